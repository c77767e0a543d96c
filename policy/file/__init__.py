"""The policy file: its format and its alerts."""
