"""How good heads are: by accuracy, through the engine, on the clock."""
