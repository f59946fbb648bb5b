"""The last wave of blocks of keys in Hopper's backward pass, and their steps."""

from collections import Counter
from typing import Any

import pytest
from windowed import WINDOWS, visible_blocks

from flashtile.backend.hopper.launch.last_wave import KeyRows, LastWave, last_wave
from flashtile.backend.hopper.launch.steps import steps_of_blocks
from flashtile.call.call import Settings

M, N = 64, 128


@pytest.mark.parametrize("sides", WINDOWS, ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(300, 300), (130, 400), (257, 60)])
def test_steps_are_the_blocks_with_visible_pairs(sides: dict[str, Any], rows: int, keys: int) -> None:
    settings = Settings(1.0, **sides)
    counts = Counter(key_block for _, key_block in visible_blocks(settings, rows, keys, M, N))
    assert steps_of_blocks(settings, rows, keys, M, N) == [counts[n] for n in range(-(-keys // N))]


def test_last_wave() -> None:
    """Whole blocks of all heads that take turns; none without a whole wave, or where it begins before these heads."""
    assert last_wave(24, 72, 1, 11, 132) == LastWave(1716, 12, 23, 1, 11)
    assert last_wave(24, 34, 3, 5, 132) == LastWave(792, 24, 21, 3, 5)
    assert last_wave(8, 18, 7, 2, 132) == LastWave(132, 12, 7, 1, 2)
    assert last_wave(11, 12, 1, 2, 132) is last_wave(10, 12, 1, 2, 132) is None  # a whole wave, or less
    assert last_wave(68, 4, 1, 2, 132) is None
    assert LastWave(792, 24, 21, 3, 5).rows(128, 4250) == KeyRows(21, 3, 8 * 128)
    assert LastWave(132, 20, 0, 20, 6).rows(128, 100) == KeyRows(0, 20, 100)
