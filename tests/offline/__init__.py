"""Compile the shipped kernels for GPUs that are not in this machine (`python -m offline` has its command line)."""
