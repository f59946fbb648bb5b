"""Tiled attention in torch operations: every device, every feature, O(S) memory."""
