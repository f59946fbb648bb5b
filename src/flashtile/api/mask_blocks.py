"""Numbers of blocks that a mask and a window hide or show, for `explain`."""

import torch
from torch import Tensor

from ..call.call import Call
from ..call.formulas import mask_formula
from ..call.problem import Problem, accumulation_dtype
from ..call.window import KeyRange, key_range
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
    ranges = window_ranges(problem)
    if mask is None and p.mask_mod is None:  # without a number for each block, of which long calls have many
        total = len(ranges) * -(-p.seqlen_k // SIZE)
        seen, full = sum(x.hi - x.lo for x in ranges), sum(x.full_hi - x.full_lo for x in ranges)
        each = p.batch * p.num_heads_q
        return {"hidden": each * (total - seen), "partial": each * (seen - full), "full": each * full}
    states = window_visibility(ranges, problem, call.tensors.q.device)
    if p.mask_mod is not None:
        states = states.minimum(function_visibility(call, problem))
    if mask is not None:
        states = states.minimum(mask_visibility(mask, p.seqlen_q, p.seqlen_k, SIZE, SIZE))
    each = p.batch // max(states.shape[0], 1) * (p.num_heads_q // max(states.shape[1], 1))
    return {name: each * int((states == state).sum()) for name, state in NAMES.items()}


def window_ranges(problem: Problem) -> list[KeyRange]:
    """Blocks of keys, in place of keys, that the window shows each block of rows."""
    window, seqlen_k = problem.window, problem.seqlen_k
    shift = seqlen_k - problem.seqlen_q
    rights = [x for x in (window.right, -shift if window.top_left else None) if x is not None]
    empty = window.left is not None and rights != [] and window.left + min(rights) < 0  # although blocks have a range
    found = []
    for row in range(0, problem.seqlen_q, SIZE):
        keys = key_range(window, row, min(row + SIZE, problem.seqlen_q) - 1, seqlen_k, shift)
        lo, hi = keys.lo // SIZE, -(-keys.hi // SIZE)
        full_lo, full_hi = -(-keys.full_lo // SIZE), (keys.full_hi + (SIZE - 1) * (keys.full_hi == seqlen_k)) // SIZE
        if empty or keys.lo >= keys.hi:
            lo = hi = 0
        full_lo = max(lo, min(full_lo, hi))
        found.append(KeyRange(lo, full_lo, max(full_lo, min(full_hi, hi)), hi))
    return found


def window_visibility(ranges: list[KeyRange], problem: Problem, device: torch.device) -> Tensor:
    """States of the blocks by a window alone, `[1, 1, blocks of rows, blocks of keys]`."""
    lo, full_lo, full_hi, hi = torch.tensor(ranges, device=device)[:, :, None].unbind(1)
    n = torch.arange(-(-problem.seqlen_k // SIZE), device=device)
    seen, full = (lo <= n) & (n < hi), (full_lo <= n) & (n < full_hi)
    return torch.where(full, FULL, torch.where(seen, PARTIAL, HIDDEN))[None, None]


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
