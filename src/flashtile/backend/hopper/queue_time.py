"""The time of a queue of tiles that programs take in order."""

import heapq
from collections.abc import Sequence

ENDS = 1.5  # time in which a tile begins and ends, in steps


def fewest_groups(heads: int, most: int) -> int:
    """Heads of each of the fewest groups of at most `most` heads."""
    return -(-heads // -(-heads // max(most, 1)))


def queue_time(heads: int, heads_at_once: int, steps: Sequence[int], programs: int) -> float:
    """Time until the last program is done, if none waits for another one. Groups of heads take turns, each of which has
    tiles of so many steps.
    """
    done = [0.0] * programs
    for first in range(0, heads, heads_at_once):
        for n in steps:
            for _ in range(min(heads_at_once, heads - first)):
                heapq.heapreplace(done, done[0] + n + ENDS)
    return max(done)
