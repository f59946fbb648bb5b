"""Kernels compiled ahead: the standard set, its compilation, and a wheel that has it."""
