"""The contract's formulas as torch operations on tiles: what the `reference` and `tiled` backends share.

Four axes, one module each: `tiles` (which rows and keys), `masking` (which of their pairs), `scores` (what a
score becomes), `softmax` and `rng` (how rows are normalised).
"""
