"""The queue of blocks of keys in the backward pass: how many heads take turns, so that programs finish together."""

import heapq
from typing import NamedTuple

from ...call.call import Settings
from ...call.window import row_range

ENDS = 1.5  # time in which a block of keys begins and ends, in blocks of rows
SHORT_QUEUE = 8  # blocks of keys for each program; in longer queues the end matters less than the L2 cache
GAIN = 0.95  # of the time, with which more heads at once are worth their room in the L2 cache


class KeyQueue(NamedTuple):
    """A dense call's blocks of keys, in the order in which programs take them."""

    heads: int  # key heads of all sequences
    steps: tuple[int, ...]  # blocks of rows that each block of keys of a head visits
    programs: int

    def heads_at_once(self, few: int, most: int) -> int:
        """`few` heads, or equal groups of at most `most` of them where a short queue then ends earlier.

        The longest blocks of a group come first, so that programs finish together; but those of the last group may come
        too late for that.
        """
        groups = -(-self.heads // max(most, 1))
        more = -(-self.heads // groups)
        if more <= few or self.heads * len(self.steps) > SHORT_QUEUE * self.programs:
            return few
        return more if self.time(more) < GAIN * self.time(few) else few

    def time(self, heads_at_once: int) -> float:
        """Time until the last program is done, if none waits for another one."""
        done = [0.0] * self.programs
        for first in range(0, self.heads, heads_at_once):
            for steps in self.steps:
                for _ in range(min(heads_at_once, self.heads - first)):
                    heapq.heapreplace(done, done[0] + steps + ENDS)
        return max(done)


def steps_of_blocks(settings: Settings, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int) -> list[int]:
    """Blocks of rows that each block of keys of a head visits (`kernels.shared.masking.m_block_range`)."""
    diagonal, shift = seqlen_k - seqlen_q + settings.diagonal, settings.j0 - settings.i0
    steps = []
    for first_key in range(0, seqlen_k, block_n):
        last_key = min(first_key + block_n, seqlen_k) - 1
        lo, hi = row_range(settings.window, first_key + shift, last_key + shift, diagonal)
        first_row, last_row = max(lo, 0), min(hi, seqlen_q - 1)
        steps.append(int(last_row // block_m - first_row // block_m) + 1 if first_row <= last_row else 0)
    return steps
