"""The queue of blocks of keys in the backward pass, with a diagonal or a window: how many heads take turns, so that
rows stay in the L2 cache and programs finish together.
"""

from functools import lru_cache
from typing import NamedTuple

from ...call.call import Settings
from ...call.window import row_range
from .queue_time import ENDS, fewest_groups, queue_time
from .scheduler_args import equal_groups

L2_BYTES = 48 * 2**20  # of rows and their dq accumulators that stay in the L2 cache
FEW_PARTS = 8  # of a group of heads, which run at once although their rows do not fit there
SHORT_QUEUE = 16  # blocks of keys for each program; in longer queues the end matters less than the L2 cache
GAIN = 0.96  # of the time, with which more heads at once are worth their room in the L2 cache


class KeyQueue(NamedTuple):
    """A dense call's blocks of keys, in the order in which programs take them."""

    heads: int  # key heads of all sequences, or parts of their groups
    steps: tuple[int, ...]  # blocks of rows that each block of keys of a head visits
    programs: int
    bytes_per_head: int  # of rows and their dq accumulators
    parts: int = 1  # of a group

    @property
    def bytes_in_flight(self) -> int:
        """Those of all heads whose blocks programs take at the same time."""
        return -(-self.programs // len(self.steps)) * self.bytes_per_head

    def heads_at_once(self) -> int:
        """Heads that take turns: twice as many as fill the device, or more where a short queue then ends earlier.

        The longest blocks of a group come first, so that programs finish together; but those of the last group may come
        too late for that.
        """
        few = self.fitting_heads(2 * self.programs // len(self.steps))
        more = fewest_groups(self.heads, L2_BYTES // self.bytes_per_head)
        if more <= few or not self.is_short:
            return few
        return more if self.time(more) < GAIN * self.time(few) else few

    def fitting_heads(self, most: int) -> int:
        """At most `most` heads, in equal groups, whose rows fit the L2 cache or that are a few parts of a group."""
        parts = self.parts if self.parts <= FEW_PARTS else 1
        return equal_groups(self.heads, max(parts, min(most, L2_BYTES // self.bytes_per_head)))

    @property
    def is_short(self) -> bool:
        return self.heads * len(self.steps) <= SHORT_QUEUE * self.programs

    @lru_cache(maxsize=1024)  # noqa: B019 - of values
    def time(self, heads_at_once: int) -> float:
        """Time until the last program is done, if none waits for another one."""
        return queue_time(self.heads, heads_at_once, self.steps, self.programs)

    def least_time(self) -> float:
        """The time with the heads that take turns, or if the queue is long, that of all programs without an end."""
        if self.is_short:
            return self.time(self.heads_at_once())
        return self.heads * (sum(self.steps) + ENDS * len(self.steps)) / self.programs


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
