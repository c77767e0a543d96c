"""What carries out a step: the C kernels, or any transformers model."""
