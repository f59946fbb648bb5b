"""Shared parts of the tests: small calls with any set of features, tiles of any size, and the check of a result."""

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flashtile.api import repeated
from flashtile.backend.tiled import support
from flashtile.call.call import Call
from flashtile.dispatch import fast_path, operators
from flashtile.testing.case import Case, ExactSides, MaskFunction, ScoreFunction
from flashtile.testing.inputs import query_key_value
from flashtile.testing.mask_functions import allowed_distances
from flashtile.testing.oracle import solve
from flashtile.testing.score_functions import tempered_table
from flashtile.testing.tolerance import compare

BACKENDS = ("tiled", "reference")


@contextmanager
def tile_size(block_m: int, block_n: int, scores: int = 2**20) -> Iterator[None]:
    """Set tiles of `block_m` rows and `block_n` keys in the tiled backend, with up to `scores` scores over heads."""
    fast_path.forget()
    try:
        with mock.patch.multiple(support, BLOCK_M=block_m, BLOCK_N=block_n, TILE_SCORES=scores):
            yield
    finally:
        fast_path.forget()


def assert_right(case: Case, *backends: str, **options: Any) -> None:
    """Require that every result and gradient of the case is within the contract's bound of the fp64 oracle."""
    expected = solve(case)
    for backend in backends or BACKENDS:
        worst = compare(case.run(backend, **options), case, expected)[0]
        assert worst.ok, f"{backend}: {worst}\n{case.description}"


def dense_case(
    *,
    batch: int = 2,
    num_heads_q: int = 2,
    num_heads_kv: int = 1,
    seqlen_q: int = 7,
    seqlen_k: int = 9,
    head_dim: int = 8,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    kind: str = "normal",
    seed: int = 0,
    forward_only: bool = False,
    **arguments: Any,
) -> Case:
    """A call of `attention` with both cotangents; `arguments` replace or add to its own."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    q, k, v = query_key_value(
        kind,
        (
            (batch, num_heads_q, seqlen_q, head_dim),
            (batch, num_heads_kv, seqlen_k, head_dim),
            (batch, num_heads_kv, seqlen_k, head_dim_v),
        ),
        dtype,
        generator,
    )
    dout = torch.randn((batch, num_heads_q, seqlen_q, head_dim_v), generator=generator, dtype=wide).to(dtype)
    dlse = torch.randn((batch, num_heads_q, seqlen_q), generator=generator, dtype=wide)
    return Case("attention", {"q": q, "k": k, "v": v} | arguments, dout, dlse, seed, forward_only=forward_only)


def offsets(*lengths: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Cumulative offsets of sequences of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


# One keyword argument, or a few, for each feature of a call of `dense_case()` with its default sizes.
def features() -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "causal": {"causal": True},
        "top_left": {"causal": "top_left"},
        "window": {"window": (3, 2)},
        "window of earlier keys": {"window": ExactSides((4, -1))},
        "attention_chunk": {"attention_chunk": 4},
        "mask": {"mask": torch.rand((2, 1, 7, 9), generator=generator) < 0.7},
        "scale": {"scale": -0.4},
        "softcap": {"softcap": 1.5},
        "bias": {"bias": randn(1, 2, 7, 9)},
        "alibi_slopes": {"alibi_slopes": torch.tensor([0.3, 0.05])},
        "sinks": {"sinks": torch.tensor([1.0, -0.5])},
        "score_mod": {"score_mod": ScoreFunction(tempered_table, (1 + 0.2 * randn(2), randn(2, 17)))},
        "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
        "head_dim_v": {"head_dim_v": 5},
        "multi-head": {"num_heads_kv": 2},
        "mask function": {"mask": MaskFunction(allowed_distances, (torch.rand((2, 17), generator=generator) < 0.7,))},
    }


def groups_of_features(given: dict[str, dict[str, Any]], size: int = 4) -> list[tuple[str, ...]]:
    """Groups of features in which each pair that a call can have together is at least once."""

    def agree(a: str, b: str) -> bool:
        return a != b and not given[a].keys() & given[b].keys()

    left = [{a, b} for a, b in itertools.combinations(given, 2) if agree(a, b)]
    groups = []
    while left:
        group = sorted(left[0])
        while len(group) < size:
            possible = [x for x in given if all(agree(x, y) for y in group)]
            added = {x: sum({x, y} in left for y in group) for x in possible}
            if not any(added.values()):
                break
            group.append(max(possible, key=added.__getitem__))
        left = [pair for pair in left if not pair <= {*group}]
        groups.append(tuple(group))
    return groups


@contextmanager
def changed_during_calls(indices: Iterable[Tensor]) -> Iterator[list[None]]:
    """Tensors that hold something else while a backend works, as if another thread wrote there. The entries of the list
    that comes back count the calls of backends.
    """
    entered: list[None] = []
    inside = operators.inside_operator

    @contextmanager
    def changed(call: Call) -> Iterator[None]:
        entered.append(None)
        held = [x.numpy() for x in indices]  # no new version, which autograd would notice
        before = [x.copy() for x in held]
        for x in held:
            x[...] = x // 2  # harmless where it is read all the same
        try:
            with inside(call):
                yield
        finally:
            for x, y in zip(held, before, strict=True):
                x[...] = y

    with ExitStack() as patches:
        for module in (fast_path, operators, repeated):
            patches.enter_context(mock.patch.object(module, "inside_operator", changed))
        yield entered


@contextmanager
def lengths_on_the_device() -> Iterator[None]:
    """The path that lengths and pages on a GPU take, where the host reads none of their values: gathered rows, every
    block visited, and entries outside the tensors taken for keys that do not exist. CPU kernels never meet that.
    """
    tiled = mock.patch.dict(os.environ, {"FLASHTILE_BACKEND": "tiled"})
    with tiled, mock.patch("flashtile.call.device.host_readable", return_value=False):
        yield
