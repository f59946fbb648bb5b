"""The kernels of heads above 256 features, but for dq."""
