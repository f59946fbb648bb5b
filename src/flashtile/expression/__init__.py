"""Score modifications: ordinary Python functions of torch operations that become part of an attention call.

`trace` turns a function into a `Program`, `derivative` differentiates it, and each backend makes its own code of both.
"""

from .formula import Formula, Untraced
from .score_mod import ScoreMod, is_local, score_mod_formula, score_mod_function

__all__ = ["Formula", "ScoreMod", "Untraced", "is_local", "score_mod_formula", "score_mod_function"]
