"""CPU kernels in C, compiled on first use; see :mod:`backends.runners.native.bindings`."""
