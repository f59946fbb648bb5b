"""Numbers of blocks that a mask and a window hide or show, for `explain`."""

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
    """Numbers of blocks of a dense call that its mask and window hide, show in part and in full, over all sequences and
    query heads; `None` for other calls, and for a function that cannot be traced.
    """
    p, mask = problem, call.tensors.mask
    hides = mask is not None or p.mask_mod is not None or not p.window.unlimited
    known = isinstance(p.mask_mod, Formula | None) and p.window.chunk is None and p.seqlen_q * p.seqlen_k > 0
    if not hides or not known or call.layout != "dense" or call.tensors.q.device.type == "meta":
        return None
    states = window_visibility(call, problem)
    if p.mask_mod is not None:
        states = states.minimum(function_visibility(call, problem))
    if mask is not None:
        states = states.minimum(mask_visibility(mask, p.seqlen_q, p.seqlen_k, SIZE, SIZE))
    each = p.batch // max(states.shape[0], 1) * (p.num_heads_q // max(states.shape[1], 1))
    return {name: each * int((states == state).sum()) for name, state in NAMES.items()}


def window_visibility(call: Call, problem: Problem) -> Tensor:
    """States of the blocks by a window alone, `[1, 1, blocks of rows, blocks of keys]`."""
    window, device = problem.window, call.tensors.q.device
    shift = problem.seqlen_k - problem.seqlen_q
    (first_row, last_row), (first_key, last_key) = (
        (x, (x + SIZE - 1).clamp(max=n - 1))
        for n in (problem.seqlen_q, problem.seqlen_k)
        for x in [torch.arange(0, n, SIZE, device=device)]
    )
    least, most = first_key - last_row[:, None], last_key - first_row[:, None]  # of `key - row`
    low = None if window.left is None else shift - window.left
    highs = [*([] if window.right is None else [shift + window.right]), *([0] if window.top_left else [])]
    full, seen = torch.ones_like(least, dtype=torch.bool), torch.ones_like(least, dtype=torch.bool)
    if low is not None:
        full, seen = full & (least >= low), seen & (most >= low)
    if highs:
        full, seen = full & (most <= min(highs)), seen & (least <= min(highs))
    if low is not None and highs and low > min(highs):
        seen = torch.zeros_like(seen)
    return torch.where(full & seen, FULL, torch.where(seen, PARTIAL, HIDDEN))[None, None]


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
    return f"by mask and window, of {sum(blocks.values()):,} blocks of {SIZE} x {SIZE} pairs: {parts}"
