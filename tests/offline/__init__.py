"""Compiling the shipped kernels for GPUs that are not here: `python -m offline` in tests/, or with --full."""
