"""Proof that speculative and vanilla decoding give the same bits."""
