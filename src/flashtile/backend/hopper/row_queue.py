"""The queue of tiles of rows in a forward pass with a diagonal or a window: how many heads take turns, so that programs
finish together.
"""

from typing import NamedTuple

from ...call.call import Settings
from ...call.window import key_range
from .queue_time import fewest_groups, queue_time

SHORT_QUEUE = 8  # tiles for each program; in longer queues the end matters less than the L2 cache
GAIN = 0.97  # of the time, with which more heads at once are worth their room in the L2 cache
MUCH = 0.9  # the same, with which all of them are, although they do not fit there


class RowQueue(NamedTuple):
    """A dense call's tiles, in the order in which programs take them."""

    heads: int  # key heads of all sequences
    steps: tuple[int, ...]  # blocks of keys that each tile of a group of query heads visits
    programs: int

    def heads_at_once(self, few: int, most: int) -> int:
        """`few` heads, or equal groups of at most `most` of them where a short queue then ends earlier.

        The longest tiles of a group come first, so that programs finish together; but those of the last group may come
        too late for that.
        """
        if few >= self.heads or self.heads * len(self.steps) > SHORT_QUEUE * self.programs:
            return few
        more = fewest_groups(self.heads, most)
        if more > few and self.time(more) < GAIN * self.time(few):
            few = more
        return self.heads if self.time(self.heads) < MUCH * self.time(few) else few

    def time(self, heads_at_once: int) -> float:
        return queue_time(self.heads, heads_at_once, self.steps, self.programs)


def key_steps(settings: Settings, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int) -> list[int]:
    """Blocks of keys that each block of rows of a head visits (`kernels.shared.masking.n_block_range`)."""
    diagonal, shift = seqlen_k - seqlen_q + settings.diagonal, settings.j0 - settings.i0
    steps = []
    for first_row in range(0, seqlen_q, block_m):
        last_row = min(first_row + block_m, seqlen_q) - 1
        keys = key_range(settings.window, first_row, last_row, seqlen_k, diagonal, shift)
        steps.append((keys.hi - 1) // block_n - keys.lo // block_n + 1 if keys.lo < keys.hi else 0)
    return steps
