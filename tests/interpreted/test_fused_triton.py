"""The backward pass in one kernel, in Triton's interpreter, against the fp64 oracle."""

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from checking import dense_case, features, offsets
from forced import first, forced
from packing import short_sequences

from flashtile.api.explain import described_call
from flashtile.backend.gpu import pairs
from flashtile.backend.gpu.pairs import ALIGN
from flashtile.backend.triton import support
from flashtile.backend.triton.launch import backward, forward
from flashtile.backend.triton.tile_config import FusedConfig, KernelConfig
from flashtile.call.call import Needs
from flashtile.call.device import describe_device
from flashtile.call.problem import Problem
from flashtile.dispatch import fast_path, planner
from flashtile.testing.case import Case
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities that the contract allows
]
HALF = torch.float16
TILES = {  # rows and keys of calls whose heads are one tile, one block of rows or one of keys
    "one tile": (13, 11, FusedConfig(KernelConfig(16, 16, 4, 1))),
    "over keys": (13, 37, FusedConfig(KernelConfig(16, 16, 4, 1), "keys")),
    "over keys, splits": (13, 37, FusedConfig(KernelConfig(16, 16, 4, 1), "keys", 2)),
    "over rows": (37, 11, FusedConfig(KernelConfig(16, 16, 4, 1), "rows")),
    "over rows, splits": (37, 11, FusedConfig(KernelConfig(16, 16, 4, 1), "rows", 2)),
}
WALKS = [name for name in TILES if name != "one tile"]
SHARED = [name for name in TILES if "splits" in name]


def calls(rows: int, keys: int) -> dict[str, dict[str, Any]]:
    """Features by name, of two sequences and two heads."""
    generator = torch.Generator().manual_seed(2)
    return {
        "plain": {},
        "causal": {"causal": True},
        "top-left, window": {"causal": "top_left", "window": (9, 2)},
        "chunks, slopes": {"attention_chunk": 4, "alibi_slopes": torch.tensor([0.5, 0.1])},
        "slopes of sequences, softcap": {"alibi_slopes": torch.rand(2, 2, generator=generator), "softcap": 2.0},
        "dropout, causal": {"dropout_p": 0.4, "dropout_seed": 3, "causal": True},
        "mask, dropout": {
            "mask": torch.rand((2, 1, rows, keys), generator=generator) > 0.4,
            "dropout_p": 0.2,
            "dropout_seed": 4,
        },
        "rows without keys": {"mask": torch.arange(rows)[:, None].expand(1, 1, rows, keys) > 5},
        "mask function, window": {**features()["mask function"], "window": (8, None)},
        "score_mod": {"score_mod": lambda score, b, h, i, j: 0.5 * score + 0.1 * (i - j) * h},
    }


NAMES = tuple(calls(13, 11))


def half_case(rows: int, keys: int, **options: Any) -> Case:
    heads = {"num_heads_q": 2, "num_heads_kv": 2, "head_dim": 24}
    return dense_case(**{**heads, "seqlen_q": rows, "seqlen_k": keys, "dtype": HALF, **options})


def results(case: Case, config: FusedConfig, launches: int = 1) -> dict[str, Any]:
    """The results of a call by one kernel of that configuration, or by others, in memory that is NaN."""
    planner.forget_plans()
    fast_path.forget()
    with (
        forced(support, backward=first(fused=config)),
        mock.patch.object(backward, "launch_fused", wraps=backward.launch_fused) as launched,
        poisoned_allocation(),
    ):
        found = case.run("triton")
    planner.forget_plans()
    fast_path.forget()
    assert launched.call_count == launches
    return found


def wrong(case: Case, config: FusedConfig, launches: int = 1) -> list[str]:
    """The results outside of their bounds."""
    return [str(x) for x in compare(results(case, config, launches), case, solve(case)) if not x.ok]


@pytest.mark.parametrize("tile", ["one tile", *SHARED])
@pytest.mark.parametrize("name", NAMES)
def test_all_gradients_of_one_launch(name: str, tile: str) -> None:
    rows, keys, config = TILES[tile]
    assert wrong(half_case(rows, keys, kind="outliers", **calls(rows, keys)[name]), config) == []


@pytest.mark.parametrize(("rows", "keys"), [(1, 16), (16, 1), (16, 16)])
def test_lengths(rows: int, keys: int) -> None:
    config = TILES["one tile"][-1]
    assert wrong(half_case(rows, keys, causal=True, head_dim=40, head_dim_v=16), config) == []


@pytest.mark.parametrize(
    ("tile", "rows", "keys"),
    [("over keys", 1, 33), ("over keys, splits", 16, 16), ("over rows", 33, 16), ("over rows, splits", 16, 1)],
)
def test_lengths_of_walks(tile: str, rows: int, keys: int) -> None:
    """Last blocks of one position, and splits without blocks."""
    assert wrong(half_case(rows, keys, head_dim=40, head_dim_v=16), TILES[tile][-1]) == []


@pytest.mark.parametrize("name", [x for x in NAMES if "mask," not in x and "without" not in x])
def test_packed_sequences(name: str) -> None:
    case = short_sequences([13, 1, 0, 16, 5], [11, 16, 5, 0, 3], **calls(13, 16)[name])
    if name == "slopes of sequences, softcap":
        case = replace(case, arguments=case.arguments | {"alibi_slopes": torch.rand(5, 2)})
    assert wrong(case, TILES["one tile"][-1]) == []


def test_packed_tokens_past_what_was_promised_have_gradients_of_zero() -> None:
    """Memory that no program stores is NaN here."""
    case = short_sequences([16, 9], [16, 9])
    longer = replace(case, arguments=case.arguments | {"cu_seqlens_q": offsets(34, 9), "cu_seqlens_k": offsets(30, 9)})
    with mock.patch("flashtile.call.device.host_readable", return_value=False):  # as of lengths on a GPU
        found = results(longer, TILES["one tile"][-1])
    for name, end in (("dq", 34), ("dk", 30), ("dv", 30)):
        assert bool(found[name].isfinite().all()), name
        assert not found[name][16:end].any(), name
        assert bool(found[name][end : end + 9].any()), name


@pytest.mark.parametrize("tile", SHARED)
def test_shared_walks_give_the_same_bits(tile: str) -> None:
    rows, keys, config = TILES[tile]
    first, second = (results(half_case(rows, keys), config) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "shape",
    [(3, 2, 13, 16), (1, 2, 1, 16), (3, 1, 13, 1), (1, 1, 13, 16), (3, 2, 1, 1), (1, 1, 1, 1)],
    ids=str,
)
def test_a_bias_of_any_shape(shape: tuple[int, ...]) -> None:
    """Each pair of dimensions kept or broadcast in every way."""
    bias = torch.randn(shape).to(HALF)
    assert wrong(half_case(13, 16, batch=3, bias=bias, softcap=3.0), TILES["one tile"][-1]) == []


@pytest.mark.parametrize("tile", WALKS)
def test_the_gradient_of_a_bias_is_left_to_other_kernels_in_a_walk(tile: str) -> None:
    rows, keys, config = TILES[tile]
    assert wrong(half_case(rows, keys, bias=torch.randn(1, 2, rows, keys).to(HALF)), config, launches=0) == []


@pytest.mark.parametrize(
    ("sizes", "walk"), [((13, 11), None), ((13, 40), "keys"), ((40, 13), "rows"), ((40, 40), "none")]
)
def test_candidates_of_few_rows_and_few_keys(sizes: tuple[int, int], walk: str | None) -> None:
    given = dict(half_case(*sizes).arguments)
    call = described_call(*(given.pop(name) for name in "qkv"), None, None, given)
    ways = support.candidates(Problem.describe(call), describe_device(torch.device("cpu")), Needs(True, True, True))
    found = [x.tile.fused for x in ways]
    assert None in found
    assert (walk in {x.walk for x in found if x is not None}) == (walk != "none")


@pytest.mark.parametrize("tile", ["one tile", "over keys, splits"])
def test_rows_of_a_bias_without_gradient_are_copied_to_whole_units(tile: str) -> None:
    rows, keys, config = TILES[tile]
    bias = torch.randn(1, 2, rows, keys).to(HALF).expand(2, 2, rows, keys)
    assert keys % ALIGN > 0
    with (
        mock.patch.object(forward, "ALIGNED_FROM", 0),
        mock.patch.object(backward, "ALIGNED_FROM", 0),
        mock.patch.object(pairs, "in_units", wraps=pairs.in_units) as copied,
    ):
        assert wrong(replace(half_case(rows, keys, bias=bias), constant=("bias",)), config) == []
    assert copied.call_count == 2
