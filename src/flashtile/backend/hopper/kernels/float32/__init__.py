"""Kernels that only float32 has: its forward pass, and rows in bfloat16 parts."""
