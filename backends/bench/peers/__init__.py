"""The gateway beside other engines: same weights, same prompts, same cores, in turns within one run."""
