"""The formulas of a call, each among all tensors that the call captures, so that kernels have one list of them."""

from ..expression import Formula, Untraced, mask_mod_formula, score_mod_formula
from ..expression.program import TensorType, type_of
from .call import Call


def score_formula(call: Call) -> Formula | None:
    """The formula of the call's score_mod."""
    if call.settings.score_mod is None:
        return None
    _, of_mask = types_of(call)
    return traced(score_mod_formula(call.settings.score_mod)).among((), of_mask)


def mask_formula(call: Call) -> Formula | None:
    """The formula of the call's mask function."""
    if call.settings.mask_mod is None:
        return None
    of_score, _ = types_of(call)
    return traced(mask_mod_formula(call.settings.mask_mod)).among(of_score)


def types_of(call: Call) -> tuple[tuple[TensorType, ...], tuple[TensorType, ...]]:
    """The types of a score_mod's tensors, and of a mask function's."""
    types = tuple([type_of(x) for x in call.tensors.score_mod_tensors])
    return types[: call.num_score_tensors], types[call.num_score_tensors :]


def traced(formula: Formula | Untraced) -> Formula:
    assert isinstance(formula, Formula), "backends decline a problem with a function that cannot be traced"
    return formula
