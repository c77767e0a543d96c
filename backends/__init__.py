"""The decoding engine: model, paged KV cache, Medusa heads, candidate trees, verification, scheduling."""

from backends.import_noise import silence

# Here, since any module of this package may be the first to import transformers.
silence()
