"""Score modifications and mask functions: Python functions of torch operations that become part of an attention call.

`trace` turns a function into a `Program`, `derivative` differentiates it, and each backend makes its own code of both.
"""

from .formula import Formula, Untraced
from .mask_mod import MaskMod
from .registry import is_local, mask_mod_formula, mask_mod_function, score_mod_formula, score_mod_function
from .score_mod import ScoreMod

__all__ = [
    "Formula",
    "MaskMod",
    "ScoreMod",
    "Untraced",
    "is_local",
    "mask_mod_formula",
    "mask_mod_function",
    "score_mod_formula",
    "score_mod_function",
]
