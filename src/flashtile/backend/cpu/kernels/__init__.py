"""The generators of the LLVM kernels."""
