"""The queue of blocks of keys in Hopper's backward pass."""

from typing import Any

import pytest

from flashtile.backend.hopper.key_queue import KeyQueue, steps_of_blocks
from flashtile.call.call import Settings

WINDOWS: tuple[dict[str, Any], ...] = (
    {"window_right": 0}, {"window_right": -70}, {"top_left": True}, {"window_left": 90, "window_right": 20},
    {"window_right": 0, "diagonal": 40, "i0": 300, "j0": 100}, {"top_left": True, "i0": 64, "j0": 200},
)  # fmt: skip
M, N = 64, 128


@pytest.mark.parametrize("sides", WINDOWS, ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(300, 300), (130, 400), (257, 60)])
def test_steps_are_the_blocks_with_visible_pairs(sides: dict[str, Any], rows: int, keys: int) -> None:
    settings = Settings(1.0, **sides)
    diagonal = keys - rows + settings.diagonal

    def sees(i: int, j: int) -> bool:
        i, j = i + settings.i0, j + settings.j0
        left, right = settings.window_left, settings.window_right
        return (
            (left is None or j >= i + diagonal - left)
            and (right is None or j <= i + diagonal + right)
            and (not settings.top_left or j <= i)
        )

    expected = [
        len({i // M for i in range(rows) if any(sees(i, j) for j in range(first, min(first + N, keys)))})
        for first in range(0, keys, N)
    ]
    assert steps_of_blocks(settings, rows, keys, M, N) == expected


def test_heads_at_once() -> None:
    """All heads in a queue of 3000 rows, where the longest blocks of a last head would end it late (measured: 11%)."""

    def causal(heads: int, seqlen: int) -> KeyQueue:
        steps = steps_of_blocks(Settings(1.0, window_right=0), seqlen, seqlen, N, N)
        return KeyQueue(heads, tuple(steps), 132)

    assert causal(16, 3000).heads_at_once(5, 16) == 16
    assert causal(24, 3000).heads_at_once(5, 16) == 12
    assert causal(16, 3000).heads_at_once(5, 4) == causal(16, 3000).heads_at_once(5, 0) == 5
    assert causal(192, 1024).heads_at_once(16, 48) == 16  # a long queue
    assert causal(32, 4096).heads_at_once(4, 12) == 4  # as even as it gets
