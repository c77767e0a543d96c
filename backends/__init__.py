"""The decoding engine: model, paged KV cache, Medusa heads, candidate trees, verification, scheduling."""
