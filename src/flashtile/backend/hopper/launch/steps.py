"""Steps of the tiles of a head, under a diagonal or a window."""

from ....call.call import Settings
from ....call.window import row_range


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
