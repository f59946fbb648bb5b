"""The parts of attention as torch operations on tiles, shared by the `tiled` and `reference` backends.

Four axes, one module each: `tiles` (rows and keys), `masking` (visible pairs), `scores` (score features), `softmax` and
`rng` (normalization and dropout).
"""
