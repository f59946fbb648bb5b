"""Visibility of whole blocks of pairs, from the formula of a mask or from a mask that is a tensor (`dense`).

`analysis` looks at the formula, once; `evaluation` computes it on blocks, with `intervals`.
"""

from .analysis import depends_on, has_classes
from .dense import SUMMARY_BLOCK, coarser, mask_visibility
from .evaluation import FULL, HIDDEN, PARTIAL, Blocks, block_visibility, positions

__all__ = [
    "FULL",
    "HIDDEN",
    "PARTIAL",
    "SUMMARY_BLOCK",
    "Blocks",
    "block_visibility",
    "coarser",
    "depends_on",
    "has_classes",
    "mask_visibility",
    "positions",
]
