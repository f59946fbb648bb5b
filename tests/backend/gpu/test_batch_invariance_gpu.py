"""Batch-invariant calls on a GPU: `pytest -m gpu tests/backend/gpu/test_batch_invariance_gpu.py`."""

import random
from typing import Any
from unittest import mock

import pytest
import torch
from neighbors import Results, Sequence, decoded, neighborhoods, packed, same_bits

import flashtile
from flashtile.backend.hopper import support as hopper
from flashtile.backend.hopper.plan import candidates, tables
from flashtile.backend.triton import support as triton
from flashtile.dispatch import fast_path, planner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
BACKENDS = [name for name, support in (("hopper", hopper), ("triton", triton)) if support.unusable() is None]
LENGTH, LONG = 700, 5000
FLOAT16, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": (200, 0)},
    "softcap and sinks": {"softcap": 5.0, "sinks": torch.linspace(-1, 2, 8)},
    "slopes": {"alibi_slopes": torch.linspace(0.01, 0.2, 8)},
}


def on_gpu(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def differing_cuts(sequence: Sequence, options: dict[str, Any], count: int, seed: int) -> list[str]:
    """Random cuts of 16 rows and more, among random neighbors, packed and in pages, that have other bits."""
    draw = random.Random(seed)
    length = len(sequence.q)
    out, lse = packed(sequence, 0, length, [], **options)
    found = []
    for around in neighborhoods(count, 64, seed):
        start = draw.randint(0, length - 16)
        stop = draw.randint(start + 16, length)
        page_size = draw.choice((None, 16, 64, 256))
        rows = packed(sequence, start, stop, around, page_size, **options)
        if not same_bits(rows, (out[start:stop], lse[:, start:stop])):
            found.append(f"{start} to {stop} among {len(around)}, page size {page_size}")
    return found


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_cuts(backend: str, dtype: torch.dtype, width: int, features: str) -> None:
    sequence = Sequence.random(LENGTH, (8, 2), width, dtype, seed=width, device="cuda")
    options = on_gpu(FEATURES[features]) | {"backend": backend}
    assert differing_cuts(sequence, options, 8, seed=width) == []


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_cuts_of_a_long_sequence(backend: str, width: int) -> None:
    dtype = FLOAT32 if backend == "triton" else BFLOAT16
    sequence = Sequence.random(LONG, (8, 1), width, dtype, device="cuda")
    assert differing_cuts(sequence, {"backend": backend}, 6, seed=3) == []


@pytest.mark.parametrize("options", [{"attention_chunk": 96}, {"score_mod": lambda s, b, h, i, j: s + 0.1 * h}])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_cuts_of_calls_that_triton_takes(options: dict[str, Any], dtype: torch.dtype) -> None:
    assert differing_cuts(Sequence.random(LENGTH, (8, 2), 64, dtype, device="cuda"), options, 5, seed=1) == []


@pytest.mark.skipif("hopper" not in BACKENDS, reason="tiles of several sizes are Hopper's")
@pytest.mark.parametrize("features", ["causal", "window"])  # with others, tiles have 128 rows alone
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_rows_of_a_tile_change_no_bit(dtype: torch.dtype, features: str) -> None:
    """The plan may take tiles of 128 or 192 rows of 64 features."""
    sequence = Sequence.random(LENGTH, (8, 2), 64, dtype, device="cuda")
    found = []
    for rows in (128, 192):
        of_rows = {width: tuple(x for x in ways if x.block_m == rows) for width, ways in tables.FORWARD.items()}
        planner.forget_plans()
        fast_path.forget()
        with mock.patch.object(candidates, "FORWARD", of_rows):
            found.append(packed(sequence, 0, LENGTH, [(40, 60)], backend="hopper", **on_gpu(FEATURES[features])))
    planner.forget_plans()
    fast_path.forget()
    assert same_bits(*found)


def decoded_everywhere(
    sequence: Sequence,
    position: int,
    options: dict[str, Any],
    seed: int,
    batches: tuple[int, ...] = (1, 2, 7, 16, 33, 64),
) -> list[Results]:
    """The row at a position in some batches, by caches, packed and in pages."""
    draw = random.Random(seed)
    found = []
    for batch in batches:
        lengths = [draw.randint(1, draw.choice((129, position, 2 * position))) for _ in range(batch - 1)]
        capacity = max(position + 1, *lengths, 0) + draw.choice((0, 64, 3000))
        found.append(decoded(sequence, position, lengths, -(-capacity // 8) * 8, **options))
        around = [(1, n) for n in lengths]
        page_size = draw.choice((None, 16, 256))
        found.append(packed(sequence, position, position + 1, around, page_size, max_seqlen_q=1, **options))
    return found


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_decoding(dtype: torch.dtype, width: int, heads: tuple[int, int], features: str) -> None:
    sequence = Sequence.random(LENGTH, heads, width, dtype, seed=width, device="cuda")
    first, *others = decoded_everywhere(sequence, 601, on_gpu(FEATURES[features]), seed=width)
    assert [same_bits(x, first) for x in others] == [True] * len(others)


def test_decoding_with_many_parts() -> None:
    sequence = Sequence.random(LONG, (32, 8), 128, BFLOAT16, device="cuda")
    first, *others = decoded_everywhere(sequence, 4700, {}, seed=5)
    assert [same_bits(x, first) for x in others] == [True] * len(others)


@pytest.mark.parametrize("heads", [(8, 8), (8, 1), (32, 1)])
def test_decoding_with_longer_parts(heads: tuple[int, int]) -> None:
    """Sequences with more keys than the most parts of the least size have longer ones, by their own length."""
    sequence = Sequence.random(33000, heads, 64, BFLOAT16, device="cuda")
    for position in (16383, 16384, 32999):
        for window in (None, (20000, 0)):
            first, *others = decoded_everywhere(sequence, position, {"window": window}, position, (1, 3, 17))
            assert [same_bits(x, first) for x in others] == [True] * len(others), (position, window)


def test_bits_change_without_it() -> None:
    sequence = Sequence.random(LONG, (32, 8), 128, BFLOAT16, device="cuda")
    first, *others = decoded_everywhere(sequence, 4700, {"batch_invariant": False}, seed=5)
    assert not all(same_bits(x, first) for x in others)


def test_graphs() -> None:
    """A captured step gives the bits of an eager one, also after the cache has grown by several parts."""
    sequence = Sequence.random(LONG, (8, 2), 128, BFLOAT16, device="cuda")
    caches = [torch.zeros(2, 2, LONG, 128, device="cuda", dtype=BFLOAT16) for _ in range(2)]
    for cache, x in zip(caches, sequence[1:], strict=True):
        cache[1] = x.transpose(0, 1)
    q = torch.randn(2, 8, 1, 128, device="cuda", dtype=BFLOAT16)
    lengths = torch.tensor([5, 300], device="cuda", dtype=torch.int32)

    def step() -> torch.Tensor:
        return flashtile.attention_with_kvcache(q, *caches, cache_seqlens=lengths, causal=True, batch_invariant=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for position in (299, 1500, 4700):
        q[1] = sequence.q[position][:, None]
        lengths[1] = position + 1
        graph.replay()
        assert torch.equal(captured[1].transpose(0, 1), decoded(sequence, position, [77] * 9, LONG)[0])
