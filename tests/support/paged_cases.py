"""Problems with keys in pages, for the Hopper kernels: everything outside of the sequences' keys is NaN."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashtile.testing.case import Case


@dataclass(frozen=True)
class Paged:
    """A call over pages. `keys` are the sequences' lengths; `queries` are those of packed queries, or one for all."""

    page_size: int
    head_dim: int = 64
    head_dim_v: int | None = None
    heads: tuple[int, int] = (4, 2)
    queries: int | tuple[int, ...] = 40
    keys: tuple[int, ...] = (1, 200, 131)
    arguments: tuple[tuple[str, Any], ...] = (("causal", True),)
    dtype: torch.dtype = torch.bfloat16
    heads_first: bool = False  # pages `[num_pages, Hkv, page_size, D]` in memory
    wide_table: bool = False  # int64
    dense_cache: bool = False  # `[B, Hkv, page_size, D]`, without a table

    def case(self, seed: int, device: str) -> Case:
        generator = torch.Generator().manual_seed(seed)
        heads_q, heads_k = self.heads

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        batch, size = len(self.keys), self.page_size
        columns = 1 if self.dense_cache else -(-max(*self.keys, 1) // size) + 1
        needed = [-(-n // size) for n in self.keys]
        num_pages = batch if self.dense_cache else sum(needed) + 3
        order = torch.randperm(num_pages, generator=generator).tolist()
        table = torch.full((batch, columns), -(2**30), dtype=torch.int64 if self.wide_table else torch.int32)
        pages = {}
        for name, width in (("k", self.head_dim), ("v", self.head_dim_v or self.head_dim)):
            shape = (num_pages, heads_k, size, width) if self.heads_first or self.dense_cache else None
            x = torch.full(shape or (num_pages, size, heads_k, width), torch.nan).to(self.dtype)
            pages[name] = x if shape is None else x.transpose(1, 2)
        for b, n in enumerate(self.keys):
            for column in range(needed[b]):
                table[b, column] = page = b if self.dense_cache else order.pop()
                rows = min(size, n - column * size)
                for x in pages.values():
                    x[page, :rows] = randn(rows, heads_k, x.shape[-1])
        arguments = dict(self.arguments)
        packed = isinstance(self.queries, tuple)
        if isinstance(self.queries, tuple):
            arguments["q"] = randn(sum(self.queries) + 2, heads_q, self.head_dim)
            arguments["cu_seqlens_q"] = torch.tensor([0, *self.queries]).cumsum(0).int()
        else:
            arguments["q"] = randn(batch, heads_q, self.queries, self.head_dim)
        lengths = torch.tensor(self.keys, dtype=torch.int32)
        if self.dense_cache:
            caches = {f"{name}_cache": x.transpose(1, 2) for name, x in pages.items()}
            arguments |= {"cache_seqlens": lengths, **caches}
        elif packed:
            arguments |= {"seqused_k": lengths, "page_table": table, "cu_seqlens_k": None, **pages}
        else:
            caches = {f"{name}_cache": x for name, x in pages.items()}
            arguments |= {"cache_seqlens": lengths, "page_table": table, **caches}
        function = "attention_varlen" if packed and not self.dense_cache else "attention_with_kvcache"
        arguments = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        return Case(function, arguments, seed=seed, forward_only=True)


WINDOW = (("window", (70, 20)),)
FEATURES = (("causal", True), ("softcap", 8.0), ("sinks", torch.tensor([0.5, -0.5, 1.0, 0.0])))
SLOPES = (("causal", True), ("alibi_slopes", torch.tensor([0.1, 0.2, 0.05, 0.3])))
PACKED = (33, 0, 140)
CASES = {
    "8 keys a page": Paged(8),
    "16": Paged(16, 128, queries=PACKED),
    "24, hdim 96": Paged(24, 96, heads_first=True),
    "32, full": Paged(32, 128, arguments=()),
    "40, hdim 72": Paged(40, 72, queries=PACKED, arguments=WINDOW),
    "64, window": Paged(64, 64, arguments=WINDOW),
    "64, features": Paged(64, 128, queries=PACKED, arguments=FEATURES, wide_table=True),
    "128, slopes": Paged(128, 64, arguments=SLOPES, heads_first=True),
    "192, hdim 256": Paged(192, 256, queries=PACKED, keys=(400, 7, 192)),
    "256": Paged(256, 128, keys=(300, 256, 0)),
    "16, hdim 192/128": Paged(16, 192, 128, queries=PACKED),
    "16, hdim 192, fp16": Paged(16, 192, dtype=torch.float16, arguments=()),
    "dense cache": Paged(203, 128, dense_cache=True),
    "dense cache, packed": Paged(300, 64, dense_cache=True, queries=PACKED, keys=(300, 2, 150)),
}


def with_missing_pages(
    size: int, device: str, *, packed: bool, dtype: torch.dtype = torch.bfloat16
) -> tuple[Case, Case]:
    """A problem with entries that are no pages, and the same one with a mask that hides their keys."""
    case = Paged(size, keys=(400, 200, 131), queries=(40, 3, 131) if packed else 40, dtype=dtype).case(5, device)
    table = case.arguments["page_table"]
    hidden = torch.ones(3, 1, 1, table.shape[1] * size, dtype=torch.bool, device=device)
    last = 200 // size - (200 % size == 0)
    for b, column, entry in ((0, 2, -1), (0, 350 // size, 10**6), (1, last, -(2**31)), (2, 0, 2**31 - 1)):
        table[b, column] = entry
        hidden[b, ..., column * size : column * size + size] = False
    sound = table.clamp(0, case.arguments["k" if packed else "k_cache"].shape[0] - 1)
    return case, replace(case, arguments=case.arguments | {"mask": hidden, "page_table": sound})
