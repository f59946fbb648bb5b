"""Numbers of blocks that a mask hides or shows, for `explain`."""

import torch
from torch import Tensor

from ..call.call import Call
from ..call.formulas import mask_formula
from ..call.problem import Problem, accumulation_dtype
from ..expression import Formula
from ..expression.blocks import FULL, HIDDEN, PARTIAL, Blocks, block_visibility, mask_visibility, positions

SIZE = 128  # rows and keys of a block
NAMES = {"hidden": HIDDEN, "partial": PARTIAL, "full": FULL}


def mask_blocks(call: Call, problem: Problem) -> dict[str, int] | None:
    """Numbers of blocks of a dense call that its mask hides, shows in part and in full, over all sequences and query
    heads; `None` for other calls, and for a function that cannot be traced.
    """
    traced, mask = isinstance(problem.mask_mod, Formula), call.tensors.mask
    known = traced if mask is None else mask.numel() > 0
    if not known or call.layout != "dense" or call.tensors.q.device.type == "meta":
        return None
    if mask is None:
        states = function_visibility(call, problem)
    else:
        states = mask_visibility(mask, problem.seqlen_q, problem.seqlen_k, SIZE, SIZE)
    each = problem.batch // max(states.shape[0], 1) * (problem.num_heads_q // max(states.shape[1], 1))
    return {name: each * int((states == state).sum()) for name, state in NAMES.items()}


def function_visibility(call: Call, problem: Problem) -> Tensor:
    """States of the blocks by a mask function."""
    formula, device = mask_formula(call), call.tensors.q.device
    assert formula is not None
    blocks = Blocks(
        torch.arange(problem.batch, device=device),
        torch.arange(problem.num_heads_q, device=device),
        positions(0, problem.seqlen_q, SIZE, device),
        positions(0, problem.seqlen_k, SIZE, device),
    )
    return block_visibility(formula, call.tensors.score_mod_tensors, blocks, accumulation_dtype(problem.dtype))


def in_words(blocks: dict[str, int]) -> str:
    parts = ", ".join(f"{count:,} {name}" for name, count in blocks.items())
    return f"by its mask, of {sum(blocks.values()):,} blocks of {SIZE} x {SIZE} pairs: {parts}"
