"""Device code: Gluon kernels for Hopper, and Triton kernels before and after the fused backward kernel."""
