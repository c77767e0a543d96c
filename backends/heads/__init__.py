"""Medusa heads: their shapes and weights, and the lists of guesses that they make."""
