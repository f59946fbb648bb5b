"""The last wave of blocks of keys in the backward pass, which more programs share than it has blocks.

Without a mask all blocks take equally long, so that a call of six and a half waves takes as long as one of seven. Its
last half wave is a launch of its own, in which several programs have some of the rows of each block.
"""

from typing import NamedTuple

from .scheduler_args import rest_of_waves


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


def last_wave(heads: int, n_blocks: int, heads_at_once: int, splits: int, programs: int) -> LastWave | None:
    """The last wave of `n_blocks` tiles of each head, which `splits` programs share each; `None` without a whole wave,
    or if it begins before the last heads that take turns.
    """
    rest = rest_of_waves(heads * n_blocks, programs)
    last_heads = (heads - 1) % heads_at_once + 1
    num_tiles = -(-rest // last_heads) * last_heads  # whole blocks of all of these heads
    if rest == 0 or num_tiles > last_heads * n_blocks:
        return None
    return LastWave(heads * n_blocks - num_tiles, num_tiles, heads - last_heads, last_heads, splits)
