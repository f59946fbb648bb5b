"""The promise of O(S) memory, and that hidden blocks cost nothing.

Memory is counted from torch's own allocation events, which the profiler records in the allocator: every byte, exactly,
the same on every run, in backward's thread too. The resident size of a process is rounded and shared with everything
else in it; a TorchDispatchMode sees nothing of what happens inside an operator.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from checking import dense_case, offsets, tile_size
from exhausted import runs_out_of_memory
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flashtile
from flashtile.backend.blockwise.scores import Tile
from flashtile.backend.tiled import loop
from flashtile.bench.allocation import live_and_peak_bytes
from flashtile.call.window import Window, key_range, row_range

H, D, BLOCK = 2, 16, 256
TILE_BYTES = H * BLOCK * BLOCK * 4  # fp32 scores of one tile over both heads


def leaves(seqlen: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(1, H, seqlen, D, dtype=dtype).requires_grad_() for _ in range(3)]


def beyond_results(run: Callable[[], Any]) -> int:
    """The least of two runs: what other tests of this process have left may be freed during one of them."""
    return min(peak - live for live, peak in (live_and_peak_bytes(run) for _ in range(2)))


def backward_of(out: Any, inputs: list[Tensor]) -> Callable[[], Any]:
    dout = torch.ones(()).expand(out.shape)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def test_the_measure_sees_a_score_matrix() -> None:
    q, k, v = leaves(512)
    assert beyond_results(lambda: flashtile.attention(q, k, v, backend="reference")) > H * 512 * 512 * 4


FEATURES: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda n: {},
    "causal": lambda n: {"causal": True},
    "mask of keys": lambda n: {"mask": torch.rand(1, 1, 1, n) < 0.9},
    "softcap and window": lambda n: {"softcap": 5.0, "window": (n // 2, n // 2)},
    "slopes and sinks": lambda n: {"alibi_slopes": torch.rand(H).requires_grad_(), "sinks": torch.rand(H)},
    "score_mod": lambda n: {"score_mod": flashtile.ScoreMod(lambda s, b, h, i, j, w: s * w[h], (torch.ones(H),))},
    "dropout": lambda n: {"dropout_p": 0.1, "dropout_seed": 1},
    "bias of keys": lambda n: {"bias": torch.randn(1, 1, 1, n).requires_grad_()},
    "bias of rows": lambda n: {"bias": torch.randn(1, H, n, 1).requires_grad_()},
}


@pytest.mark.parametrize("name", FEATURES)
def test_memory_beyond_inputs_and_results(name: str) -> None:
    """A few tiles, and no more for a longer sequence: dbias too takes memory in proportion to bias."""
    beyond: dict[str, list[int]] = {"forward": [], "backward": []}
    for seqlen in (512, 1024):
        q, k, v = leaves(seqlen)
        features = FEATURES[name](seqlen)
        wanted = [q, k, v, *(x for x in features.values() if isinstance(x, Tensor) and x.requires_grad)]
        with tile_size(BLOCK, BLOCK):
            beyond["forward"].append(beyond_results(lambda: flashtile.attention(q, k, v, **features, backend="tiled")))  # noqa: B023
            out = flashtile.attention(q, k, v, **features, backend="tiled")
            beyond["backward"].append(beyond_results(backward_of(out, wanted)))
    most = 2 if name == "dropout" else 1  # the random numbers of a tile are several int64 for each score
    for (short, long), tiles in zip(beyond.values(), (4, 8), strict=True):
        assert short < tiles * most * TILE_BYTES
        assert long <= short + 64 * 1024


def test_low_precision_accumulates_in_proportion_to_the_inputs() -> None:
    """bf16 gradients are summed in fp32: in addition to the tiles, twice the bytes of q, k and v."""
    inputs = leaves(1024, torch.bfloat16)
    with tile_size(BLOCK, BLOCK):
        out = flashtile.attention(*inputs, backend="tiled")
        beyond = beyond_results(backward_of(out, inputs))
    assert beyond < 8 * TILE_BYTES + 3 * H * 1024 * D * 4


def test_packed_sequences() -> None:
    cu = offsets(500, 0, 700, 36)
    q, k, v = (torch.randn(1236, H, D).requires_grad_() for _ in range(3))
    with tile_size(BLOCK, BLOCK):
        assert beyond_results(lambda: flashtile.attention_varlen(q, k, v, cu, cu, backend="tiled")) < 8 * TILE_BYTES
        out = flashtile.attention_varlen(q, k, v, cu, cu, backend="tiled")
        assert beyond_results(backward_of(out, [q, k, v])) < 8 * TILE_BYTES


def test_what_forward_keeps_for_backward() -> None:
    """out and lse; the inputs are there anyway."""
    q, k, v = leaves(1024)
    kept, _ = live_and_peak_bytes(lambda: flashtile.attention(q, k, v, causal=True, backend="tiled"))
    assert kept <= H * 1024 * (D + 1) * 4 + 1024


def test_the_cpu_backend() -> None:
    """Forward: each thread's tile, and no more for a longer sequence. Backward: dq once for each split of the keys, of
    which there are at most 16, and numbers of rows.
    """
    beyond = []
    for seqlen in (2048, 8192):
        inputs = leaves(seqlen)
        run = lambda: flashtile.attention(*inputs, causal=True, backend="cpu")  # noqa: B023, E731
        beyond.append(beyond_results(run))
        assert beyond_results(backward_of(run(), inputs)) < 18 * inputs[0].nbytes + 2**20 * torch.get_num_threads()
    assert beyond[1] <= beyond[0] < 2**20 * torch.get_num_threads()


# Blocks ------------------------------------------------------------------------------------------------------------


def visited_tiles(run: Callable[[], Any]) -> list[Tile]:
    """The tiles that the tiled backend computes, forward and backward."""
    seen = []

    def watched(*arguments: Any) -> Iterator[Tile]:
        for tile in loop.tiles(*arguments):
            seen.append(tile)
            yield tile

    forward, backward = (mock.patch(f"flashtile.backend.tiled.{n}.tiles", watched) for n in ("forward", "backward"))
    with forward, backward:
        run()
    return seen


@pytest.mark.parametrize(
    ("arguments", "visited"),
    [
        ({}, 64),
        ({"causal": True}, 36),
        ({"causal": "top_left"}, 36),
        ({"window": (8, 0)}, 8 + 7),
        ({"window": (1, 1)}, 8 + 7 + 7),
        ({"causal": True, "window": (7, None)}, 8 + 7),
        ({"mask": torch.block_diag(*[torch.ones(8, 8)] * 8).bool()[None, None]}, 8),
        ({"mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)}, 0),
    ],
    ids=range(8),
)
def test_hidden_blocks_are_not_visited(arguments: dict[str, Any], visited: int) -> None:
    """The visited ones of 8 x 8 tiles, in forward and in backward."""
    inputs = leaves(64)
    with tile_size(8, 8):
        assert len(visited_tiles(lambda: flashtile.attention(*inputs, **arguments, backend="tiled"))) == visited
        out = flashtile.attention(*inputs, **arguments, backend="tiled")
        assert len(visited_tiles(backward_of(out, inputs))) == visited


def test_blocks_without_hidden_pairs_run_no_mask_code() -> None:
    """Under causal only the 8 tiles on the diagonal ask which pairs are visible."""
    q, k, v = leaves(64)
    with tile_size(8, 8), mock.patch("flashtile.backend.blockwise.scores.window_visible", return_value=None) as asked:
        flashtile.attention(q, k, v, causal=True, backend="tiled")
    assert asked.call_count == 8


sides = st.none() | st.integers(-6, 12)
windows = st.builds(Window, sides, sides, st.booleans(), st.none() | st.integers(1, 9))


def sees(window: Window, row: int, key: int, diagonal: int) -> bool:
    left = window.left is None or key >= row + diagonal - window.left
    right = window.right is None or key <= row + diagonal + window.right
    chunk = window.chunk is None or (row + diagonal) // window.chunk == key // window.chunk
    return left and right and chunk and (not window.top_left or key <= row)


@given(
    window=windows,
    rows=st.tuples(st.integers(0, 20), st.integers(1, 8)),
    seqlen_k=st.integers(0, 20),
    diagonal=st.integers(-15, 15),
    shift=st.integers(0, 10),
)
def test_key_range_is_the_visible_keys(
    window: Window, rows: tuple[int, int], seqlen_k: int, diagonal: int, shift: int
) -> None:
    """`[lo, hi)` holds every key that some row sees, and `[full_lo, full_hi)` only keys that every row sees."""

    first, last = rows[0], rows[0] + rows[1] - 1
    found = key_range(window, first, last, seqlen_k, diagonal, shift)
    block = range(first, last + 1)
    some = {j for j in range(seqlen_k) if any(sees(window, i, j + shift, diagonal) for i in block)}
    every = {j for j in range(seqlen_k) if all(sees(window, i, j + shift, diagonal) for i in block)}
    visited, full = (set(range(*ends)) for ends in ((found.lo, found.hi), (found.full_lo, found.full_hi)))
    assert some <= visited <= set(range(seqlen_k))
    assert full <= every
    assert full <= visited


@given(
    window=windows,
    keys=st.tuples(st.integers(0, 20), st.integers(1, 8)),
    diagonal=st.integers(-15, 15),
)
def test_row_range_has_all_rows_that_see_a_key(window: Window, keys: tuple[int, int], diagonal: int) -> None:
    first, last = keys[0], keys[0] + keys[1] - 1
    lo, hi = row_range(window, first, last, diagonal)
    rows = range(-40, 60)
    some = {i for i in rows if any(sees(window, i, j, diagonal) for j in range(first, last + 1))}
    assert some <= {i for i in rows if lo <= i <= hi}


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_memory_that_runs_out_leaves_everything_usable(backend: str) -> None:
    features = {"alibi_slopes": torch.rand(2), "sinks": torch.rand(2), "bias": torch.randn(1, 2, 1, 9)}
    case = dense_case(head_dim=5, **features)  # whose rows of gradients are padded to whole vectors

    def run() -> dict[str, Tensor]:
        return case.run(backend)

    def check() -> None:
        results = run()
        assert all(torch.equal(results[name], expected[name]) for name in expected)

    def run_for_the_first_time() -> None:
        replace(case, arguments=case.arguments | {"scale": next(scales)}).run(backend)

    expected, scales = run(), itertools.count(0.1, 0.01)
    assert runs_out_of_memory(run, check) > 5
    assert runs_out_of_memory(run_for_the_first_time, check) > 8
