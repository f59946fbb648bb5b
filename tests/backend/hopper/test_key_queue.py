"""The queue of blocks of keys in Hopper's backward pass, and its last wave."""

from collections import Counter
from typing import Any

import pytest
import torch
from windowed import WINDOWS, visible_blocks

from flashtile.api.explain import described_call
from flashtile.backend.hopper import head_splits
from flashtile.backend.hopper.key_queue import KeyQueue, steps_of_blocks
from flashtile.backend.hopper.last_wave import KeyRows, LastWave, last_wave
from flashtile.backend.hopper.tables import FUSED_BACKWARD
from flashtile.call.call import Settings

M, N = 64, 128


@pytest.mark.parametrize("sides", WINDOWS, ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(300, 300), (130, 400), (257, 60)])
def test_steps_are_the_blocks_with_visible_pairs(sides: dict[str, Any], rows: int, keys: int) -> None:
    settings = Settings(1.0, **sides)
    counts = Counter(key_block for _, key_block in visible_blocks(settings, rows, keys, M, N))
    assert steps_of_blocks(settings, rows, keys, M, N) == [counts[n] for n in range(-(-keys // N))]


def queue_of(heads: int, seqlen: int, width: int, block_m: int) -> KeyQueue:
    steps = steps_of_blocks(Settings(1.0, window_right=0), seqlen, seqlen, block_m, N)
    return KeyQueue(heads, tuple(steps), 132, seqlen * width * 8)


def test_heads_at_once() -> None:
    """Twice as many as fill the device; all, where the longest blocks of the last ones would end a queue late."""
    assert queue_of(16, 3000, 64, N).heads_at_once() == 8
    steps = steps_of_blocks(Settings(1.0, window_right=0), 2048, 6144, M, N)
    assert KeyQueue(16, tuple(steps), 132, 2**21, 4).heads_at_once() == 16  # measured: 6%
    assert queue_of(192, 1024, 64, N).heads_at_once() == 32  # a long queue
    assert queue_of(128, 2048, 96, M).heads_at_once() == 16
    assert queue_of(32, 4096, 128, M).heads_at_once() == 8  # as even as it gets
    assert queue_of(2, 2**16, 128, M).heads_at_once() == 1  # more than the L2 cache holds


@pytest.mark.parametrize(("heads", "lengths", "width", "expected"), [
    ((32, 8), (8192, 8192), 128, 2), ((32, 8), (8192, 8192), 64, 1), ((64, 8), (8192, 8192), 128, 4),
    ((56, 8), (4096, 4096), 128, 7), ((48, 16), (4096, 4096), 96, 1), ((71, 1), (2048, 2048), 64, 71),
    ((96, 12), (3072, 3072), 96, 4), ((96, 12), (3072, 3072), 64, 2), ((96, 48), (3072, 3072), 96, 1),
    ((16, 4), (2048, 6144), 128, 4), ((16, 4), (1024, 8192), 128, 1), ((32, 1), (4096, 4096), 128, 16),
])  # fmt: skip
def test_programs_of_a_group(heads: tuple[int, int], lengths: tuple[int, int], width: int, expected: int) -> None:
    """The fastest measured number within 2%, of causal calls (docs/journal): of 96/12 heads of 96 features one program
    takes 24% longer than four, of 1024 rows and 8192 keys two take 14% longer than one.
    """
    q, k = (torch.empty(1, h, n, width, device="meta") for h, n in zip(heads, lengths, strict=True))
    call = described_call(q, k, k, None, None, {"causal": True})
    assert head_splits.of_call(call, FUSED_BACKWARD[width], 132) == expected


def test_last_wave() -> None:
    """More programs than one for each tile, where whole waves leave few; whole blocks of all heads that take turns."""

    def wave(heads: int, n_blocks: int, heads_at_once: int, m_blocks: int, group: int = 1) -> LastWave | None:
        return last_wave(heads, n_blocks, heads_at_once, m_blocks, group, 132)

    assert wave(24, 72, 1, 144) == LastWave(1716, 12, 23, 1, 11)
    assert wave(24, 34, 3, 67) == LastWave(792, 24, 21, 3, 5)
    assert LastWave(792, 24, 21, 3, 5).rows(128, 4250) == KeyRows(21, 3, 8 * 128)
    assert LastWave(132, 20, 0, 20, 6).rows(128, 100) == KeyRows(0, 20, 100)
    assert wave(24, 36, 3, 72) is not None  # half a wave
    assert wave(48, 35, 3, 70) is None  # of which twice as many waves gain half as much
    assert wave(10, 22, 6, 43) is None  # of so many tiles that their sums take longer
    assert wave(11, 12, 1, 12) is wave(10, 12, 1, 12) is None  # a whole wave, or less
    assert wave(68, 4, 1, 500) is None  # a last wave that begins before the last head
    assert wave(8, 18, 7, 1, 24) is None  # programs share blocks of rows, not heads of a group
    assert wave(8, 18, 7, 2, 12) == LastWave(132, 12, 7, 1, 2)
