"""Medusa heads in every format that is found in the wild."""
