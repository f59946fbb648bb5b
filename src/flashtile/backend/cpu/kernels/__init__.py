"""Generators of the LLVM kernels."""
