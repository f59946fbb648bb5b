"""Named problems with a score_mod or a mask function for the Hopper kernels: each kind of load and derivative, in each
kernel.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from hopper_variants import LONGER, VARIANTS, case_of
from torch import Tensor

from flashtile.testing.case import Case, ScoreFunction
from flashtile.testing.mask_functions import random_mask_function
from flashtile.testing.oracle import Expected, solve
from flashtile.testing.score_functions import (
    batch_offset_where_even,
    distance_table,
    relative_position,
    soft_bound,
    temperature,
    tempered_table,
)

DOCUMENT = 100  # positions


def decay(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, rate: Tensor) -> Tensor:
    return score * torch.exp(-rate[h] * rate[h] * (q_idx - k_idx).abs())


def causal(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    """Rows whose scores are all -inf, where there are more of them than keys, and full blocks of -inf."""
    return torch.where(q_idx <= k_idx, score, -math.inf)


def documents(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, document: Tensor) -> Tensor:
    """Integers loaded by row and by key."""
    return torch.where(document[q_idx] == document[k_idx], score, -math.inf)


def buckets(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, table: Tensor) -> Tensor:
    """Logarithmic buckets, as in T5."""
    distance = (q_idx - k_idx).abs()
    far = 8 + (torch.log(distance.clamp(min=1) / 8) * 3).int()
    return score + table[torch.where(distance < 8, distance, far.clamp(max=31)), h]


def near_buckets(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, table: Tensor) -> Tensor:
    """Logarithmic buckets that end at 22 positions: the kernels read a table of distances."""
    distance = (q_idx - k_idx).abs()
    far = 8 + (torch.log(distance.clamp(min=1) / 8) * 3).int()
    bucket = torch.where(distance < 8, distance, far.clamp(max=11))
    return score + table[torch.where(k_idx > q_idx, bucket + 12, bucket), h]


def undefined_where_hidden(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, x: Tensor) -> Tensor:
    """NaN for pairs that causal from the top left hides, and so is the derivative."""
    return score * (1 + x[h] * torch.log(q_idx - k_idx + 1))


def defined(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, x: Tensor) -> Tensor:
    return score * (1 + x[h] * torch.log((q_idx - k_idx).clamp(min=0) + 1))


def by_key(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, x: Tensor, kept: Tensor) -> Tensor:
    """A factor of each key, in float16 and transposed, and a bool for each row; wraps around at the table's end."""
    return torch.where(kept[q_idx % 7], score * x[h, k_idx % 33], score)


def of_positions(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Elements of each key, and of each pair by the key's position itself."""
    return score * x[h, k_idx] + y[q_idx % 3, k_idx]


def signed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, factor: Tensor) -> Tensor:
    """The score times a number of the head, of any sign and magnitude."""
    return -score / factor[h] * 2.0


def square(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    return score + 0.1 * score * score


ScoreMod = Callable[..., Tensor]
TENSORS: dict[ScoreMod, Callable[[int, int, torch.Generator], tuple[Tensor, ...]]] = {
    relative_position: lambda batch, heads, g: (0.05 * torch.randn(heads, generator=g),),
    soft_bound: lambda batch, heads, g: (),
    distance_table: lambda batch, heads, g: (torch.randn(heads, 17, generator=g),),
    temperature: lambda batch, heads, g: (1 + 0.25 * torch.randn(heads, generator=g),),
    batch_offset_where_even: lambda batch, heads, g: (torch.randn(batch, heads, generator=g),),
    tempered_table: lambda batch, heads, g: (
        1 + 0.25 * torch.randn(heads, generator=g),
        torch.randn(heads, 17, generator=g),
    ),
    decay: lambda batch, heads, g: (0.1 * torch.randn(heads, generator=g),),
    causal: lambda batch, heads, g: (),
    documents: lambda batch, heads, g: ((torch.arange(max(LONGER)) // DOCUMENT).int(),),
    buckets: lambda batch, heads, g: (torch.randn(32, heads, generator=g),),
    near_buckets: lambda batch, heads, g: (torch.randn(24, heads, generator=g),),
    undefined_where_hidden: lambda batch, heads, g: (0.1 * torch.randn(heads, generator=g),),
    by_key: lambda batch, heads, g: (
        torch.randn(33, heads, generator=g).half().t(),
        torch.rand(7, generator=g) > 0.5,
    ),
    of_positions: lambda batch, heads, g: (
        torch.randn(heads, max(LONGER), generator=g),
        torch.randn(3, max(LONGER), generator=g),
    ),
    signed: lambda batch, heads, g: (torch.tensor([-2.0, 1.5, 1e30, -math.inf])[:heads].repeat(heads)[:heads],),
    square: lambda batch, heads, g: (),
}
VARIANT_OF = {  # the other features of each function's problems
    relative_position: ("full 64", "packed everything 64", "grouped heads 128", "causal 96", "causal 192/128"),
    soft_bound: ("causal 64", "causal 128", "packed 256"),
    distance_table: ("causal 64", "window 128", "packed 96", "window 192"),
    temperature: ("grouped heads 64", "packed 128"),
    batch_offset_where_even: ("packed 64", "top left 128"),
    tempered_table: ("slopes 64", "softcap 128", "full 256"),
    decay: ("full 128", "window 64", "packed window 192/128"),
    causal: ("full 64", "full 128"),
    documents: ("causal 64", "full 128", "packed 192"),
    buckets: ("causal 128", "full 64"),
    near_buckets: ("full 64", "packed everything 64", "causal 128", "grouped heads 128", "causal 192/128"),
    undefined_where_hidden: ("top left 64", "top left 128", "top left 256"),
    by_key: ("full 64", "sinks 128", "causal 96", "causal 256"),
    of_positions: ("causal 64",),
    signed: ("full 128", "packed everything 96"),
    square: ("causal 128", "everything 64", "packed window 128"),
}
MASK_VARIANTS = {  # a mask function, a score_mod or none, and the other features
    "causal by head 64": (0, None, "full 64"),
    "first keys 128": (1, None, "sinks 128"),
    "packed documents 128": (2, None, "packed window 128"),
    "distances 64": (3, None, "packed everything 64"),
    "reach of a table 96": (4, distance_table, "causal 96"),
    "heads, square 192/128": (5, square, "causal 192/128"),
    "causal by head, undefined 64": (0, undefined_where_hidden, "full 64"),
    "distances, decay 256": (3, decay, "full 256"),
    "reach of a table, near buckets 64": (4, near_buckets, "full 64"),
}
PROBLEMS = {f"{fn.__name__}, {name}": (fn, name) for fn, names in VARIANT_OF.items() for name in names}


def score_mod_case(problem: str, seed: int, device: str, lengths: tuple[int, ...] = LONGER) -> Case:
    """A random problem, without gradients of captured tensors: those are computed by other backends."""
    fn, name = PROBLEMS[problem]
    return with_score_mod(fn, case_of(name, seed, device, lengths), seed, device)


def with_score_mod(fn: ScoreMod, case: Case, seed: int, device: str) -> Case:
    q, cu_seqlens = case.arguments["q"], case.arguments.get("cu_seqlens_q")
    batch = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    tensors = TENSORS[fn](batch, q.shape[1], torch.Generator().manual_seed(seed))
    if fn is documents:  # an entry for each position: a block of keys may reach past the last one
        rows = 2 if cu_seqlens is None else 0
        tensors = tuple(x[: max(q.shape[rows], case.arguments["k"].shape[rows])] for x in tensors)
    score_mod = ScoreFunction(fn, tuple(x.to(device) for x in tensors))
    constant = ("alibi_slopes", *(f"score_mod_{n}" for n in range(len(tensors))))
    return replace(case, arguments=case.arguments | {"score_mod": score_mod}, constant=constant, description="")


def mask_case(problem: str, seed: int, device: str, lengths: tuple[int, ...] = LONGER) -> Case:
    """A random problem with a mask function."""
    choice, fn, name = MASK_VARIANTS[problem]
    case = case_of(name, seed, device, lengths)
    case = case if fn is None else with_score_mod(fn, case, seed, device)
    q, cu_seqlens = case.arguments["q"], case.arguments.get("cu_seqlens_q")
    batch = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    mask = random_mask_function(choice, batch, q.shape[1], device, torch.Generator().manual_seed(seed))
    return replace(case, arguments=case.arguments | {"mask": mask}, description="")


def expected(case: Case) -> dict[str, Expected]:
    """The oracle's results. It differentiates hidden pairs too: of those that are undefined, a function that is not."""
    score_mod = case.arguments.get("score_mod")
    if score_mod is not None and score_mod.fn is undefined_where_hidden:
        case = replace(case, arguments=case.arguments | {"score_mod": ScoreFunction(defined, score_mod.tensors)})
    return solve(case)


assert {name for _, name in PROBLEMS.values()} <= {*VARIANTS}
