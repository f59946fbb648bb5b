"""The fused backward kernel, for head dimensions up to 128."""
