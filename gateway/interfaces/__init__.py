"""Other APIs as thin translations of chat completions: requests in, answers and events out. Pure."""
