"""Visibility of whole blocks of pairs, from the formula of a mask or from a mask that is a tensor (`dense`).

`analysis` looks at the formula, once; `evaluation` computes it on blocks, with `intervals`.
"""

from .analysis import depends_on
from .dense import mask_visibility
from .evaluation import FULL, HIDDEN, PARTIAL, Blocks, block_visibility, positions

__all__ = [
    "FULL",
    "HIDDEN",
    "PARTIAL",
    "Blocks",
    "block_visibility",
    "depends_on",
    "mask_visibility",
    "positions",
]
