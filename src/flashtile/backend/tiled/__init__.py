"""Blockwise attention in torch operations: any device, every feature, O(S) memory."""
