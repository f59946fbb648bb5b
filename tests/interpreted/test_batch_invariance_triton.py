"""Batch-invariant calls by the Triton kernels, in Triton's interpreter."""

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from neighbors import Sequence, decoded, packed, same_bits

import flashtile
from flashtile.backend.triton import support
from flashtile.backend.triton.plan import few_rows
from flashtile.backend.triton.tile_config import KernelConfig
from flashtile.dispatch import fast_path, planner

pytestmark = pytest.mark.skipif(not support.interpreted(), reason="needs TRITON_INTERPRET=1")
FLOAT16, FLOAT32 = torch.float16, torch.float32
LENGTH = 75
AROUND = [(3, 20), (1, 1)]
SINKS = torch.tensor([0.5, 2.0])
PREFILL: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "causal": (FLOAT16, {}),
    "window": (FLOAT32, {"window": (21, 0)}),
    "features": (FLOAT16, {"window": (30, None), "softcap": 4.0, "sinks": SINKS}),
    "chunks": (FLOAT16, {"attention_chunk": 24}),
}


@pytest.mark.parametrize("name", PREFILL)
def test_cuts(name: str) -> None:
    dtype, options = PREFILL[name]
    options = options | {"backend": "triton"}
    sequence = Sequence.random(LENGTH, (2, 1), 16, dtype)
    out, lse = packed(sequence, 0, LENGTH, [], **options)
    for (start, stop), page_size in zip(((0, 16), (9, 41), (50, 75)), (None, 8, 24), strict=True):
        rows = packed(sequence, start, stop, AROUND if page_size else [], page_size, **options)
        assert same_bits(rows, (out[start:stop], lse[:, start:stop])), (start, stop)


class Parts(NamedTuple):
    """How a decoded row's keys are divided: rows of a tile, and the most parts of 32 keys or more."""

    rows: int
    most: int


DECODING: dict[str, tuple[torch.dtype, Parts, dict[str, Any]]] = {
    "causal": (FLOAT16, Parts(8, 32), {}),
    "features": (FLOAT32, Parts(16, 32), {"window": (40, 0), "softcap": 4.0, "sinks": SINKS}),
    "window": (FLOAT16, Parts(8, 1), {"window": (40, 0), "sinks": SINKS}),
    "slopes": (FLOAT16, Parts(16, 2), {"alibi_slopes": torch.tensor([0.1, 0.02])}),
}


@pytest.mark.parametrize("name", DECODING)
def test_decoding(name: str) -> None:
    """In parts of 32 keys or, where these are too many, of 64, dealt to one program or to three."""
    dtype, (rows, most), options = DECODING[name]
    options = options | {"backend": "triton"}
    sequence = Sequence.random(LENGTH, (2, 1), 16, dtype)
    tile = KernelConfig(rows, 16, 4, 1)
    found = []
    with (
        mock.patch.multiple(few_rows, LEAST_PART=32, KEYS_OF_ROW=1, MOST_PARTS=most, FILLING=1),
        mock.patch.object(few_rows, "tile_of", return_value=tile),
    ):
        for programs in (1, 3):
            planner.forget_plans()
            fast_path.forget()
            with mock.patch.object(few_rows, "splits_that_fill", return_value=[programs]), only_last():
                found.append(decoded(sequence, 70, [3, 90][:programs], 100 * programs, **options))
                for page_size in (None, 8):
                    found.append(packed(sequence, 70, 71, [(1, 40)], page_size, max_seqlen_q=1, **options))
    planner.forget_plans()
    fast_path.forget()
    assert [same_bits(x, found[0]) for x in found] == [True] * len(found)
    expected = decoded(sequence, 70, [], 80, **options | {"backend": "reference", "batch_invariant": False})
    for x, y in zip(found[0], expected, strict=True):
        torch.testing.assert_close(x.float(), y.float(), atol=2e-3, rtol=2e-3)


def only_last() -> Any:
    """A patch by which the last candidate is the plan."""
    every = support.candidates
    return mock.patch.object(support, "candidates", lambda *given: every(*given)[-1:])


def test_bits_change_without_it() -> None:
    """Blocks that need masks come first, and which ones do depends on the tile."""
    sequence = Sequence.random(LENGTH, (2, 1), 16, FLOAT32)
    options: dict[str, Any] = {"backend": "triton", "batch_invariant": False}
    out, lse = packed(sequence, 0, LENGTH, [], **options)
    assert not same_bits(packed(sequence, 9, 75, [], **options), (out[9:], lse[:, 9:]))


def test_rows_without_keys() -> None:
    q, k = torch.randn(2, 2, 1, 16), torch.randn(2, 1, 40, 16)
    held = torch.tensor([0, 40], dtype=torch.int32)
    for sinks in (None, SINKS):
        out, lse = flashtile.attention_with_kvcache(
            q, k, k, cache_seqlens=held, sinks=sinks, batch_invariant=True, backend="triton", return_lse=True
        )
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert torch.equal(lse[0, :, 0], torch.full((2,), -torch.inf) if sinks is None else sinks)
