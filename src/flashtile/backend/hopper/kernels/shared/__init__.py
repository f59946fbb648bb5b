"""Building blocks of several kernels."""
