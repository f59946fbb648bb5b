"""The parts of attention as torch operations on tiles, shared by the `tiled` and `reference` backends.

Four axes, one module each: `tiles` (rows and keys), `masking` (visible pairs), `scores` (score features), `softmax` and
`rng` (normalization and dropout).
"""

# Why these backends decline batch-invariant calls.
PRODUCTS_OF_PYTORCH = "PyTorch multiplies, whose products round a row by the sizes of its tile"
