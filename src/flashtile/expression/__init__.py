"""Score modifications: ordinary Python functions of torch operations that become part of an attention call."""

from .score_mod import ScoreMod, score_mod_function

__all__ = ["ScoreMod", "score_mod_function"]
