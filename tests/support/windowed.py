"""Windows of calls, and the blocks with pairs that they show, pair by pair."""

from typing import Any

from flashtile.call.call import Settings

WINDOWS: tuple[dict[str, Any], ...] = (
    {"window_right": 0}, {"window_right": -70}, {"top_left": True}, {"window_left": 90, "window_right": 20},
    {"window_right": 0, "diagonal": 40, "i0": 300, "j0": 100}, {"top_left": True, "i0": 64, "j0": 200},
)  # fmt: skip


def visible_blocks(settings: Settings, rows: int, keys: int, block_m: int, block_n: int) -> set[tuple[int, int]]:
    """Numbers of the blocks of rows and of keys that have a visible pair."""
    diagonal = keys - rows + settings.diagonal

    def sees(i: int, j: int) -> bool:
        i, j = i + settings.i0, j + settings.j0
        left, right = settings.window_left, settings.window_right
        return (
            (left is None or j >= i + diagonal - left)
            and (right is None or j <= i + diagonal + right)
            and (not settings.top_left or j <= i)
        )

    return {(i // block_m, j // block_n) for i in range(rows) for j in range(keys) if sees(i, j)}
