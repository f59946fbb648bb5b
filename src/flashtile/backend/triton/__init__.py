"""Attention in Triton: every feature but score_mod, forward and backward, on any GPU that Triton serves."""
