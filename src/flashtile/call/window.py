"""Which keys a query row may see by position, and which key blocks a block of rows has to visit.

Causal is a window before it reaches a kernel: bottom-right causal closes the window's right side at 0. Only
`top_left` needs a second bound, because it is anchored at row 0 and not at the last row.
"""

import math
from typing import NamedTuple


class Window(NamedTuple):
    """Key `j` is visible to row `i` iff `i + diagonal - left <= j <= i + diagonal + right`, with
    `diagonal = seqlen_k - seqlen_q`; `None` is unlimited, and a side may be negative. `top_left` asks for `j <= i`
    as well, `chunk` for `j` and `i + diagonal` in one chunk of that many positions.
    """

    left: int | None = None
    right: int | None = None
    top_left: bool = False
    chunk: int | None = None

    @property
    def unlimited(self) -> bool:
        return self == UNLIMITED

    @property
    def negative(self) -> bool:
        """Whether a side is below 0, so that rows need not see the key on their diagonal."""
        return (self.left is not None and self.left < 0) or (self.right is not None and self.right < 0)


UNLIMITED = Window()


class ExactWindow(NamedTuple):
    """A `window` whose sides are all meant as they stand, -1 too: `None` alone is unlimited. A negative side moves the
    window away from the query's own key.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 64) for _ in range(3))
        >>> out = flashtile.attention(q, k, v, window=flashtile.ExactWindow(None, -1))  # the keys before its own
        >>> bool(out[:, :, 0].any())
        False

    Attributes:
        left: key j is visible iff `j >= i + Sk - Sq - left`.
        right: and `j <= i + Sk - Sq + right`.
    """

    left: int | None = None
    right: int | None = None


class KeyRange(NamedTuple):
    """The keys that a block of rows visits: all of them lie in `[lo, hi)`; in `[full_lo, full_hi)` every row sees
    every key, so those blocks run without mask code.
    """

    lo: int
    full_lo: int
    full_hi: int
    hi: int


def key_range(window: Window, first_row: int, last_row: int, seqlen_k: int, diagonal: int, shift: int = 0) -> KeyRange:
    """Keys for the rows `first_row..last_row` (inclusive, positions in the whole sequence).

    `shift` is the position of the first key held here, where keys are one shard of a longer sequence; the range
    that comes back counts from that key.
    """
    lo, full_lo, full_hi, hi = 0, 0, seqlen_k, seqlen_k
    if window.left is not None:
        lo = first_row + diagonal - window.left - shift
        full_lo = last_row + diagonal - window.left - shift
    if window.right is not None:
        full_hi = min(full_hi, first_row + diagonal + window.right + 1 - shift)
        hi = min(hi, last_row + diagonal + window.right + 1 - shift)
    if window.top_left:
        full_hi = min(full_hi, first_row + 1 - shift)
        hi = min(hi, last_row + 1 - shift)
    if window.chunk is not None:
        first, last = (row + diagonal - (row + diagonal) % window.chunk - shift for row in (first_row, last_row))
        lo, full_lo = max(lo, first), max(full_lo, last)
        full_hi, hi = min(full_hi, first + window.chunk), min(hi, last + window.chunk)
    lo = min(max(lo, 0), seqlen_k)
    hi = max(hi, lo)
    full_lo = min(max(full_lo, lo), hi)
    full_hi = min(max(full_hi, full_lo), hi)
    return KeyRange(lo, full_lo, full_hi, hi)


def row_range(window: Window, first_key: int, last_key: int, diagonal: int) -> tuple[float, float]:
    """The first and the last row (infinite without limits) that may see the keys `first_key..last_key`
    (inclusive; all are positions in the whole sequence).
    """
    lo, hi = -math.inf, math.inf
    if window.left is not None:
        hi = last_key - diagonal + window.left
    if window.right is not None:
        lo = first_key - diagonal - window.right
    if window.top_left:
        lo = max(lo, first_key)
    if window.chunk is not None:
        lo = max(lo, first_key - first_key % window.chunk - diagonal)
        hi = min(hi, last_key - last_key % window.chunk + window.chunk - 1 - diagonal)
    return lo, hi


def visible_pairs(window: Window, seqlen_q: int, seqlen_k: int) -> int:
    """The number of (row, key) pairs that the window leaves visible."""
    diagonal, rows, keys = seqlen_k - seqlen_q, range(seqlen_q), range(seqlen_k)
    if window.chunk is None:
        return _pairs_of_band(window, rows, keys, diagonal)
    pairs = 0
    for start in range(diagonal - diagonal % window.chunk, seqlen_k, window.chunk):
        own_rows = rows[max(start - diagonal, 0) : max(start + window.chunk - diagonal, 0)]
        own_keys = keys[max(start, 0) : max(start + window.chunk, 0)]
        pairs += _pairs_of_band(window, own_rows, own_keys, diagonal)
    return pairs


def _pairs_of_band(window: Window, rows: range, keys: range, diagonal: int) -> int:
    """The pairs of some rows and keys that the window's sides leave visible."""
    ends = [] if window.right is None else [diagonal + window.right + 1]
    ends += [1] if window.top_left else []
    visible = _pairs_below(min(ends), rows, keys) if ends else len(rows) * len(keys)
    if window.left is None:
        return visible
    return max(visible - _pairs_below(diagonal - window.left, rows, keys), 0)


def _pairs_below(end: int, rows: range, keys: range) -> int:
    """The pairs with `key < row + end`."""

    def before(n: int) -> int:
        """Those of the rows whose ends are the first key and the `n - 1` after it."""
        n, above = min(max(n, 0), len(keys)), max(n - len(keys), 0)
        return n * (n - 1) // 2 + above * len(keys)

    first = rows.start + end - keys.start
    return before(first + len(rows)) - before(first)
