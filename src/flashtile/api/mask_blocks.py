"""Numbers of blocks that a mask hides or shows, for `explain`."""

import torch

from ..call.call import Call
from ..call.formulas import mask_formula
from ..call.problem import Problem, accumulation_dtype
from ..expression import Formula
from ..expression.blocks import FULL, HIDDEN, PARTIAL, Blocks, block_visibility, positions

SIZE = 128  # rows and keys of a block
NAMES = {"hidden": HIDDEN, "partial": PARTIAL, "full": FULL}


def mask_blocks(call: Call, problem: Problem) -> dict[str, int] | None:
    """Numbers of blocks of a dense call that its mask function hides, shows in part and in full, over all sequences and
    query heads; `None` for other calls, and for a function that cannot be traced.
    """
    formula = mask_formula(call) if isinstance(problem.mask_mod, Formula) else None
    device = call.tensors.q.device
    if formula is None or call.layout != "dense" or device.type == "meta":
        return None
    blocks = Blocks(
        torch.arange(problem.batch, device=device),
        torch.arange(problem.num_heads_q, device=device),
        positions(0, problem.seqlen_q, SIZE, device),
        positions(0, problem.seqlen_k, SIZE, device),
    )
    real = accumulation_dtype(problem.dtype)
    states = block_visibility(formula, call.tensors.score_mod_tensors, blocks, real)
    each = problem.batch // max(states.shape[0], 1) * (problem.num_heads_q // max(states.shape[1], 1))
    return {name: each * int((states == state).sum()) for name, state in NAMES.items()}


def in_words(blocks: dict[str, int]) -> str:
    parts = ", ".join(f"{count:,} {name}" for name, count in blocks.items())
    return f"by its mask function, of {sum(blocks.values()):,} blocks of {SIZE} x {SIZE} pairs: {parts}"
