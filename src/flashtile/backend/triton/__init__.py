"""Attention in Triton: every feature, forward and backward, on any GPU that Triton serves."""
