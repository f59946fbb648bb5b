"""The wall of scores: the order in which algorithms visit its tiles, and the bytes that they move along the way."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from drawing import FAINT, MARK, PAPER, line, picture, polygon, readable, rect, shade, text
from torch import Tensor

from flashtile_ladder import step05_flash1, step06_flash2, step10_variants
from flashtile_ladder.measure.counted import Counted

N, D, TILE, LEFT = 384, 64, 64, 150  # tokens, head dimension, rows and keys of a tile, keys of the window


class Visit(NamedTuple):
    """A tile, and the bytes that had moved when it was reached."""

    row: int
    key: int
    read: int
    written: int


class Watched(Counted):
    """A tensor in HBM that counts, and notes each read of a part of it."""

    def __init__(self, x: Tensor, counts: dict[str, int], name: str, notes: list[tuple[str, int, int, int]]):
        super().__init__(x, counts)
        self.name, self.notes = name, notes

    def __getitem__(self, part: Any) -> Tensor:
        self.notes.append((self.name, part.start // TILE, self.counts["read"], self.counts["written"]))
        return super().__getitem__(part)


def visits(attention: Callable[..., Any], inner: str) -> list[Visit]:
    """Tiles in their order: each read of the tensor `inner` begins one. The last entry is the end."""
    counts, notes = {"read": 0, "written": 0}, []
    tensors = torch.randn(3, N, D, generator=torch.Generator().manual_seed(0))
    attention(*(Watched(x, counts, name, notes) for x, name in zip(tensors, "qkv", strict=True)))
    found, place = [], {"q": 0, "k": 0}
    for name, block, read, written in notes:
        place[name] = block
        if name == inner:
            found.append(Visit(place["q"], place["k"], read, written))
    return [*found, Visit(-1, -1, counts["read"], counts["written"])]


def flash1(q: Any, k: Any, v: Any) -> Any:
    return step05_flash1.attention(q, k, v, memory=4 * D * TILE)


def flash2(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    return step06_flash2.attention(q, k, v, causal, block_m=TILE, block_n=TILE)


def causal(q: Any, k: Any, v: Any) -> Any:
    return flash2(q, k, v, True)


def window(q: Any, k: Any, v: Any) -> Any:
    return step10_variants.attention(q, k, v, True, window=(LEFT, 0))


def seen(causal: bool, left: int | None) -> Tensor:
    """bool `[N, N]`: where a row sees a key."""
    i, j = torch.arange(N)[:, None], torch.arange(N)
    return (j <= i) & (j >= i - (N if left is None else left)) if causal else torch.ones(N, N, dtype=torch.bool)


def wall() -> str:
    """The order of tiles in four algorithms, and the bytes counted along."""
    panels = [
        ("FlashAttention-1", "keys outside", visits(flash1, "q"), seen(False, None)),
        ("FlashAttention-2", "rows outside", visits(flash2, "v"), seen(False, None)),
        ("causal", "FlashAttention-2", visits(causal, "v"), seen(True, None)),
        (f"window of {LEFT} keys", "step 10", visits(window, "v"), seen(True, LEFT)),
    ]
    most = max(found[-1].read + found[-1].written for _, _, found, _ in panels)
    parts = [text(20, 30, f"The wall of scores, N = {N}, in tiles of {TILE} x {TILE}", 17, bold=True)]
    for i, (title, words, found, visible) in enumerate(panels):
        parts += panel(30 + 235 * i, title, words, found, visible)
        parts += along(30 + 235 * i, found, most)
    notes = (
        "The numbers are the order of the tiles; white ones are not visited. Framed: some row sees a part of the tile "
        "alone, and mask code runs.",
        f"Below: bytes so far, counted while the steps run: read in blue, written in orange on top (d = {D}, float32).",
    )
    parts += [text(20, 470 + 18 * i, note, 12, fill=FAINT) for i, note in enumerate(notes)]
    return picture(960, 502, "Order of tiles in FlashAttention-1, -2, causal and window", parts)


CELL = 34


def panel(x: float, title: str, words: str, found: list[Visit], visible: Tensor) -> list[str]:
    order = {(visit.row, visit.key): i for i, visit in enumerate(found[:-1])}
    parts = [text(x, 58, title, 14, bold=True), text(x, 75, words, 12, fill=FAINT)]
    marks = []
    for row in range(N // TILE):
        for key in range(N // TILE):
            left, top = x + CELL * key, 85 + CELL * row
            place = order.get((row, key))
            fill = PAPER if place is None else shade(place / max(1, len(order) - 1))
            parts.append(rect(left, top, CELL, CELL, fill, "#d1d5db"))
            if place is None:
                continue
            parts.append(text(left + CELL / 2, top + 22, str(place + 1), 12, "middle", readable(fill)))
            if not visible[TILE * row : TILE * (row + 1), TILE * key : TILE * (key + 1)].all():
                marks.append(rect(left + 1.5, top + 1.5, CELL - 3, CELL - 3, "none", MARK, 2.5))
    return parts + marks


def along(x: float, found: list[Visit], most: int) -> list[str]:
    """Bytes so far, tile by tile: read below, written on top of them."""
    width, bottom, height = CELL * (N // TILE), 425.0, 100
    across = width / (N // TILE) ** 2
    ends = found[1:]
    lower, upper = [(x, bottom)], [(x, bottom)]  # corners
    for i, visit in enumerate(ends, 1):
        lower.append((x + across * i, bottom - height * visit.read / most))
        upper.append((x + across * i, bottom - height * (visit.read + visit.written) / most))
    last = found[-1]
    return [
        polygon([*upper, *reversed(lower)], "#fdba74"),
        polygon([*lower, (lower[-1][0], bottom)], "#93c5fd"),
        line([(x, bottom - height), (x, bottom), (x + width, bottom)], FAINT, 1),
        text(x, 443, f"{last.read / 1e6:.2f} MB read, {last.written / 1e6:.2f} written", 12, bold=True),
    ]
