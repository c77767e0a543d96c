"""Models and tokenizers: the demo model, tiny ones for tests, what is fetched from a hub."""
