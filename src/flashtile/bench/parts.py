"""A part of a large problem that is a small problem of its own, so that the fp64 oracle can solve it.

Rows `first:last` of one sequence and one group of heads, with the keys they may see, give the same out and dq as in the
full problem. With a cotangent that is zero outside these rows, dk and dv agree too: rows without a cotangent add
nothing. Dropout is the exception, because it counts positions from the start.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..testing.case import Case, ScoreFunction
from .providers.provider import effective_window, group_of

SOLVED_PAIRS = 2**20  # pairs of a row and a key, over heads, that the oracle solves at a time
MOST_ROWS = 64


@dataclass(frozen=True)
class Part:
    """Rows `first:last` of a sequence, keys `0:keys`, one key/value head and the query heads that read it."""

    sequence: int
    head_kv: int
    first: int
    last: int
    keys: int

    def __str__(self) -> str:
        return f"rows {self.first}..{self.last - 1} of sequence {self.sequence}, key/value head {self.head_kv}"


def pairs(case: Case) -> int:
    return sum(n * m for n, m in lengths(case)) * case.arguments["q"].shape[1]


def lengths(case: Case) -> list[tuple[int, int]]:
    """Queries and keys of each sequence."""
    q, k = case.arguments["q"], case.arguments["k"]
    if case.function == "attention":
        return [(q.shape[2], k.shape[2])] * q.shape[0]
    counted = (case.arguments[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    return list(zip(*counted, strict=True))


def parts(case: Case) -> list[Part]:
    """Two parts: the last rows of the last sequence and head, and middle rows of the longest sequence, first head."""
    sizes, group = lengths(case), group_of(case)
    last_head = case.arguments["k"].shape[1] - 1
    longest = max(range(len(sizes)), key=lambda n: sizes[n][0])
    return [
        part_ending_at(len(sizes) - 1, last_head, sizes[-1][0], sizes[-1][1], group),
        middle_part(case, sizes, longest, group),
    ]


def middle_part(case: Case, sizes: list[tuple[int, int]], sequence: int, group: int) -> Part:
    """Rows in the middle of a sequence, or its last rows.

    Bottom-right alignment moves with the last key. So middle rows can be cut out only if they see no later key
    (causal), or if positions do not matter.
    """
    seqlen_q, seqlen_k = sizes[sequence]
    left, right = effective_window(case)
    middle = max(seqlen_q // 2, 1)
    if right == 0 and middle + seqlen_k - seqlen_q > 0:
        return part_ending_at(sequence, 0, middle, middle + seqlen_k - seqlen_q, group)
    positional = (left, right) != (-1, -1) or case.arguments.get("alibi_slopes") is not None
    return part_ending_at(sequence, 0, seqlen_q if positional else middle, seqlen_k, group)


def part_ending_at(sequence: int, head: int, last: int, keys: int, group: int) -> Part:
    rows = max(1, min(MOST_ROWS, last, SOLVED_PAIRS // max(keys * group, 1)))
    return Part(sequence, head, last - rows, last, keys)


def cut(case: Case, part: Part) -> Case:
    """The part as a dense problem on the CPU."""
    inputs, group = case.arguments, group_of(case)
    heads = slice(part.head_kv * group, (part.head_kv + 1) * group)
    arguments: dict[str, Any] = {name: x for name, x in inputs.items() if name in ("causal", "window", "softcap")}
    arguments |= {name: pick(case, part, name, inputs[name]) for name in ("q", "k", "v")}
    for name in ("bias", "mask"):
        if inputs.get(name) is not None:
            arguments[name] = pairwise(inputs[name], part, heads).cpu()
    if inputs.get("alibi_slopes") is not None:
        slopes = inputs["alibi_slopes"]
        arguments["alibi_slopes"] = (slopes if slopes.dim() == 1 else slopes[part.sequence])[heads].cpu()
    if inputs.get("sinks") is not None:
        arguments["sinks"] = inputs["sinks"][heads].cpu()
    if inputs.get("score_mod") is not None:
        arguments["score_mod"] = shifted(inputs["score_mod"], part, heads.start)
    dout = None if case.dout is None else pick(case, part, "out", case.dout)
    return Case("attention", arguments, dout, seed=case.seed, description=str(part), forward_only=case.forward_only)


def shifted(score_mod: Any, part: Part, head: int) -> ScoreFunction:
    """The score modification of a part: its indices count from the start of the call."""

    def fn(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, *tensors: Tensor) -> Tensor:
        return score_mod.fn(score, b + part.sequence, h + head, q_idx + part.first, k_idx, *tensors)

    return ScoreFunction(fn, tuple(x.detach().cpu() for x in score_mod.tensors))


def pairwise(tensor: Tensor, part: Part, heads: slice) -> Tensor:
    """The part of a tensor that broadcasts to [B, H, Sq, Sk]."""
    wanted = (slice(part.sequence, part.sequence + 1), heads, slice(part.first, part.last), slice(0, part.keys))
    return tensor[tuple(slice(None) if n == 1 else x for n, x in zip(tensor.shape, wanted, strict=True))]


def pick(case: Case, part: Part, name: str, tensor: Tensor) -> Tensor:
    """The part of an input or result, [1, H, S, D] on the CPU. Names as in `Case.run`, without a leading "d"."""
    return view(case, part, name, tensor).cpu()


def view(case: Case, part: Part, name: str, tensor: Tensor) -> Tensor:
    group = group_of(case)
    keys = name in ("k", "v")
    heads = slice(part.head_kv, part.head_kv + 1) if keys else slice(part.head_kv * group, (part.head_kv + 1) * group)
    first, last = (0, part.keys) if keys else (part.first, part.last)
    if case.function == "attention":
        return tensor[part.sequence : part.sequence + 1, heads, first:last]
    start = int(case.arguments["cu_seqlens_k" if keys else "cu_seqlens_q"][part.sequence])
    return tensor[start + first : start + last, heads].transpose(0, 1)[None]


def cotangent(case: Case, part: Part) -> Tensor:
    """dout, zero outside the part's rows and heads."""
    assert case.dout is not None
    dout = torch.zeros_like(case.dout)
    view(case, part, "out", dout).copy_(view(case, part, "out", case.dout))
    return dout
