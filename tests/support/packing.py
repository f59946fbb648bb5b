"""One packed call of four sequences, two of them empty on one side, the same call with its keys in pages, and short
sequences of any lengths.
"""

from typing import Any

import torch
from checking import offsets
from torch import Tensor

from flashtile.testing.case import Case

LENGTHS_Q, LENGTHS_K = (5, 0, 3, 9), (7, 4, 0, 6)
TOTAL_Q, TOTAL_K = sum(LENGTHS_Q) + 2, sum(LENGTHS_K) + 3  # the last tokens belong to no sequence
HQ, HKV, D, DV = 4, 2, 8, 6


def packed_case(**arguments: Any) -> Case:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (TOTAL_Q, HQ, D), "k": (TOTAL_K, HKV, D), "v": (TOTAL_K, HKV, DV)}
    given = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    given |= {"cu_seqlens_q": offsets(*LENGTHS_Q), "cu_seqlens_k": offsets(*LENGTHS_K)}
    dout = torch.randn((TOTAL_Q, HQ, DV), generator=generator)
    dlse = torch.randn((HQ, TOTAL_Q), generator=generator)
    return Case("attention_varlen", given | arguments, dout, dlse)


def short_sequences(queries: list[int], keys: list[int], **options: Any) -> Case:
    """Sequences of these lengths in float16, of two heads, before tokens that belong to none."""
    generator = torch.Generator().manual_seed(len(queries))
    total_q, total_k = sum(queries) + 19, sum(keys) + 21
    sizes = {"q": (total_q, 2, 24), "k": (total_k, 2, 24), "v": (total_k, 2, 40)}
    given: dict[str, Any] = {name: torch.randn(x, generator=generator).half() for name, x in sizes.items()}
    given |= {"cu_seqlens_q": offsets(*queries), "cu_seqlens_k": offsets(*keys)}
    given |= {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys)}
    return Case("attention_varlen", given | options, torch.randn((total_q, 2, 40), generator=generator).half())


def in_pages(case: Case, page_size: int, seed: int = 0) -> tuple[Case, Tensor]:
    """The same keys in shuffled pages filled with NaN, and each key's slot, [Tk]."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-n // page_size) for n in LENGTHS_K]
    spare = 2
    pages = torch.randperm(sum(needed) + spare, generator=generator).tolist()
    table = torch.full((len(needed), max(needed)), pages.pop(), dtype=torch.int32)
    k, v = (case.arguments[name] for name in ("k", "v"))
    paged = {"k": k.new_full((len(pages) + 1, page_size, HKV, D), torch.nan)}
    paged["v"] = v.new_full((len(pages) + 1, page_size, HKV, DV), torch.nan)
    tokens = torch.zeros(TOTAL_K, dtype=torch.int64)
    for b, start in enumerate(offsets(*LENGTHS_K)[:-1].tolist()):
        for position in range(LENGTHS_K[b]):
            if position % page_size == 0:
                table[b, position // page_size] = pages.pop()
            tokens[start + position] = table[b, position // page_size] * page_size + position % page_size
            for name, x in (("k", k), ("v", v)):
                paged[name].flatten(0, 1)[tokens[start + position]] = x[start + position]
    arguments = case.arguments | paged | {"page_table": table}
    return Case(case.function, arguments, case.dout, case.dlse), tokens
