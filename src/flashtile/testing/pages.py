"""Keys and values of packed sequences, moved to pages."""

import torch
from torch import Tensor

from .draw import NAN, Draw


def in_pages(
    draw: Draw, k: Tensor, v: Tensor, starts: list[int], used: list[int], shared: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [T, Hkv, D] in permuted pages [num_pages, page_size, Hkv, D], NaN in empty slots, and the table.

    Sequence b has the `used[b]` tokens from `starts[b]` on; its first `shared[b]` may also belong to another sequence.
    """
    rng = draw.rng
    page_size = draw.choice(draw.page_sizes)
    needed = [-(-n // page_size) for n in used]
    pages = list(range(sum(needed) + rng.randint(1, 4)))
    rng.shuffle(pages)
    unused_entry = rng.choice([pages[0], 0, -1, 2**30])  # never read
    table = torch.full((len(used), max(needed) + rng.randint(0, 2)), unused_entry, dtype=torch.int32)
    paged_k, paged_v = (x.new_full((len(pages), page_size, *x.shape[1:]), NAN) for x in (k, v))
    for b, (start, n) in enumerate(zip(starts, used, strict=False)):
        for page in range(needed[b]):
            table[b, page] = slot = pages.pop()
            first, last = start + page * page_size, start + min(n, (page + 1) * page_size)
            paged_k[slot, : last - first], paged_v[slot, : last - first] = k[first:last], v[first:last]
    if len(used) > 1 and min(shared[:2]) >= page_size and rng.random() < 0.15:
        table[1, 0] = table[0, 0]  # two sequences with a common beginning
    return paged_k, paged_v, table
