"""Attention one block at a time in torch operations, for the `tiled` and `reference` backends."""
