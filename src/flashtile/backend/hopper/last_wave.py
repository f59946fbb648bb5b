"""The last wave of blocks of keys in the backward pass, which more programs share than it has blocks.

Without a mask all blocks take equally long, so that a call of six and a half waves takes as long as one of seven. Its
last half wave is a launch of its own, in which several programs have some of the rows of each block.
"""

from typing import NamedTuple

from .queue_time import ENDS

LAUNCHES = 6.0  # time of the launches around the wave, in blocks of rows
SUMS = 0.055  # of zeros, sums and conversion for each tile: 20 bytes of each element of dk and dv (`key_queue`)
GAIN = 0.97  # of the time, for which dk and dv in fp32 and their conversion are worth their memory
MAX_SPLITS = 16


class KeyRows(NamedTuple):
    """Some of the rows of dk and dv: the first ones of some heads, counted through all sequences."""

    first_head: int
    heads: int
    seqlen: int


class LastWave(NamedTuple):
    """The last tiles of a launch: the first blocks of keys of the last heads that take turns."""

    first_tile: int
    num_tiles: int
    first_head: int
    heads: int
    splits: int  # programs for each tile

    def rows(self, block_n: int, seqlen_k: int) -> KeyRows:
        """The rows of these heads that are in the wave."""
        return KeyRows(self.first_head, self.heads, min(seqlen_k, self.num_tiles // self.heads * block_n))


def last_wave(
    heads: int, n_blocks: int, heads_at_once: int, m_blocks: int, group: int, programs: int
) -> LastWave | None:
    """The last wave of `n_blocks` tiles of each head, which visit `m_blocks` blocks of rows of each of a group's heads;
    `None` if dividing it gains little, or if it begins before the last heads that take turns.
    """
    waves, rest = divmod(heads * n_blocks, programs)
    if waves == 0 or rest == 0:
        return None
    last_heads = (heads - 1) % heads_at_once + 1
    num_tiles = -(-rest // last_heads) * last_heads  # whole blocks of all of these heads
    if num_tiles > last_heads * n_blocks:
        return None

    def time(splits: int) -> float:
        return -(-num_tiles * splits // programs) * (-(-m_blocks // splits) * group + ENDS)

    splits = min(range(2, min(MAX_SPLITS, m_blocks) + 1), key=time, default=1)
    whole = m_blocks * group + ENDS
    if waves * whole + LAUNCHES + SUMS * num_tiles + time(splits) > GAIN * (waves + 1) * whole:
        return None
    return LastWave(heads * n_blocks - num_tiles, num_tiles, heads - last_heads, last_heads, splits)
