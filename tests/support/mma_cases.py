"""Small calls of each feature for the kernels of mma.sync, on tiles that are smaller yet."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checking import dense_case, offsets
from gluon_emulation.mma_backend import FOLDER, emulated
from torch import Tensor

from flashtile.backend.triton.tile_config import KernelConfig, TileConfig
from flashtile.testing.case import Case, ExactSides, MaskFunction, ScoreFunction
from flashtile.testing.mask_functions import allowed_distances
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.score_functions import tempered_table
from flashtile.testing.tolerance import compare

BOTH = ["mma.forward", "preprocess", "mma.backward", "mma.from_sums"]
WIDE_FORWARD = ["mma.wide_forward"]
WIDE_BOTH = [*WIDE_FORWARD, *BOTH[1:]]
INF, NAN = torch.inf, torch.nan


def tile_of(block_m: int, block_n: int, stages: int) -> TileConfig:
    plain = KernelConfig(block_m, block_n, 4, 1)
    mma = plain._replace(num_stages=stages, mma=True)
    return TileConfig(mma, plain, plain, one_loop=mma, given_splits=plain)


SMALL, SMALL_TWO = tile_of(16, 16, 1), tile_of(16, 16, 2)
LARGE, LARGE_TWO = tile_of(32, 16, 1), tile_of(16, 32, 2)
TILES = (SMALL, SMALL_TWO, LARGE, LARGE_TWO)
WIDE_TILES = tuple(  # whose forward kernel has slots
    tile_of(16, 16, 1)._replace(forward=KernelConfig(*x, mma=True))
    for x in ((16, 16, 4, 4), (16, 32, 4, 3), (32, 16, 4, 2))
)


def randn(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(seqlen_q: int = 20, seqlen_k: int = 37, head_dim: int = 16, **arguments: Any) -> Case:
    given = {"batch": 1, "num_heads_kv": 2, "dtype": torch.float16} | arguments
    return dense_case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, **given)


def constant(name: str, **arguments: Any) -> Case:
    return replace(dense(**arguments), constant=(name,))


def packed(
    lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], more: int = 3, head_dim: int = 16, **arguments: Any
) -> Case:
    """Two heads, and tokens that belong to no sequence."""
    total_q, total_k = sum(lengths_q) + more, sum(lengths_k) + more
    q, dout = (randn(total_q, 2, head_dim, seed=n).half() for n in (0, 1))
    k, v = (randn(total_k, 1, head_dim, seed=n).half() for n in (2, 3))
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets(*lengths_q), "cu_seqlens_k": offsets(*lengths_k)}
    return Case("attention_varlen", given | arguments, dout, randn(2, total_q, seed=4))


def without_some_rows() -> Case:
    """Sequences that use fewer rows and keys than there is room for."""
    used = {name: torch.tensor(n, dtype=torch.int32) for name, n in (("q", (13, 0, 18)), ("k", (20, 6, 11)))}
    case = packed((20, 4, 18), (21, 9, 33), seqused_q=used["q"], seqused_k=used["k"])
    case.arguments["q"][13:24] = NAN
    return case


TABLES = (1 + 0.2 * randn(2), randn(2, 17))
MODIFIED = ScoreFunction(tempered_table, TABLES)
BY_HEAD = MaskFunction(allowed_distances, (randn(2, 17) < 0.6,))
INFINITE = torch.tensor([INF, -INF, NAN, 0.0, 1.0]).repeat(4)[:, None] * torch.tensor([1.0, 0.0, 1.0]).repeat(13)[:37]
CASES: dict[str, Callable[..., Case]] = {
    "plain": dense,
    "bfloat16, whole tiles": partial(dense, 32, 32, dtype=torch.bfloat16),
    "causal": partial(dense, causal=True),
    "causal, more rows than keys": partial(dense, 37, 20, causal=True),
    "top left": partial(dense, 37, 20, causal="top_left"),
    "one row": partial(dense, 1, 40, causal=True),
    "one key": partial(dense, 33, 1),
    "no keys": partial(dense, 5, 0),
    "window": partial(dense, window=(9, 4)),
    "window of earlier keys": partial(dense, window=ExactSides((20, -3))),
    "window without keys": partial(dense, window=ExactSides((-60, 70))),
    "attention chunk": partial(dense, attention_chunk=12, causal=True),
    "grouped heads": partial(dense, num_heads_q=6, num_heads_kv=2),
    "multi-query, two sequences": partial(dense, batch=2, num_heads_q=3, num_heads_kv=1, causal=True),
    "head dim 8": partial(dense, head_dim=8),
    "head dim 24": partial(dense, head_dim=24),
    "head dim 40": partial(dense, head_dim=40, causal=True),
    "head dim 64": partial(dense, head_dim=64),
    "head dim 96": partial(dense, head_dim=96),
    "head dims 24 and 40": partial(dense, head_dim=24, head_dim_v=40),
    "head dims 96 and 16": partial(dense, head_dim=96, head_dim_v=16, causal=True),
    "scale": partial(dense, scale=-0.4),
    "softcap": partial(dense, softcap=1.5),
    "sinks": partial(dense, sinks=torch.tensor([1.0, -0.5]), causal=True),
    "infinite sinks": partial(dense, sinks=torch.tensor([INF, -INF])),
    "sinks with a bias": partial(dense, sinks=torch.tensor([1.0, -0.5]), bias=randn(1, 2, 20, 37)),
    "bias": partial(dense, bias=randn(1, 2, 20, 37), causal=True),
    "bias, whole tiles": partial(dense, 32, 32, bias=randn(1, 2, 32, 32)),
    "bias of heads": partial(dense, bias=randn(1, 2, 1, 1)),
    "bias of rows": partial(dense, bias=randn(1, 1, 20, 1).half()),
    "bias of keys": partial(dense, batch=2, bias=randn(2, 1, 1, 37)),
    "infinite bias": partial(dense, bias=INFINITE[None, None]),
    "large bias": partial(dense, bias=randn(1, 2, 20, 37) + 3e4),
    "mask": partial(dense, mask=randn(1, 2, 20, 37) > 0),
    "mask of keys": partial(dense, batch=2, mask=randn(2, 1, 1, 37) > 0),
    "mask function": partial(dense, mask=BY_HEAD),
    "mask function, causal": partial(dense, mask=BY_HEAD, causal=True),
    "score_mod": partial(dense, score_mod=MODIFIED),
    "score_mod and softcap": partial(dense, score_mod=MODIFIED, softcap=2.0, causal=True),
    "slopes": partial(constant, "alibi_slopes", alibi_slopes=torch.tensor([0.3, 0.05])),
    "everything": partial(
        dense,
        softcap=2.0,
        bias=randn(1, 2, 20, 37),
        mask=randn(1, 1, 20, 37) > -1,
        sinks=torch.tensor([1.0, -0.5]),
        score_mod=MODIFIED,
        window=(30, 3),
    ),
    "packed": partial(packed, (17, 0, 5, 20), (18, 4, 0, 33)),
    "packed, causal": partial(packed, (17, 1, 5), (18, 33, 3), causal=True),
    "packed, sinks": partial(packed, (17, 1, 5), (18, 33, 3), sinks=torch.tensor([1.0, -0.5])),
    "packed, some rows in use": without_some_rows,
}


DIMS = ((512, 512), (320, 320), (264, 504), (512, 64), (40, 384))  # of wide heads
WIDE = (
    "bfloat16, whole tiles", "causal", "causal, more rows than keys", "one row", "no keys", "window",
    "window without keys", "multi-query, two sequences", "softcap", "sinks", "bias", "mask", "score_mod", "slopes",
    "everything",
)  # fmt: skip


def wide(name: str) -> Case:
    """A case with heads of more than 256 features."""
    if name == "packed":
        return packed((17, 0, 5, 20), (18, 4, 0, 33), head_dim=264, causal=True)
    head_dim, head_dim_v = DIMS[WIDE.index(name) % len(DIMS)]
    return CASES[name](head_dim=head_dim, head_dim_v=head_dim_v)


def wrong(case: Case, tile: TileConfig, folder: Path = FOLDER, kernels: list[str] = BOTH) -> list[str]:
    """Results outside of their error bounds, of calls that launch these kernels first."""
    with emulated(tile, folder=folder) as launched, poisoned_allocation():
        results = case.run("triton")
    expected = [x for x in kernels if x != "mma.backward" or case.arguments["k"].numel() > 0]
    assert launched[: len(expected)] == expected
    return [f"{case.description}\n  {x}" for x in compare(results, case, solve(case)) if not x.ok]


def made(name: str) -> Case:
    return CASES[name]()
