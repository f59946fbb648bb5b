"""A paged KV cache: two sequences share the pages of their prompt, and each takes a page when its last one is full."""

import torch

import flashtile

HEADS, HEADS_KV, HEAD_DIM, PAGE = 8, 2, 64, 16
k_pages, v_pages = (torch.zeros(8, PAGE, HEADS_KV, HEAD_DIM) for _ in range(2))  # [num_pages, page_size, Hkv, D]
k_pages[:2], v_pages[:2] = torch.randn(2, 2, PAGE, HEADS_KV, HEAD_DIM)  # a prompt of 32 tokens, in pages 0 and 1
page_table = torch.tensor([[0, 1, 2, 0], [0, 1, 3, 0]], dtype=torch.int32)  # then a page of its own for each sequence
lengths = torch.tensor([32, 32], dtype=torch.int32)  # keys of each sequence so far
free = [4, 5, 6, 7]

with torch.no_grad():
    for _ in range(20):
        for b, length in enumerate(lengths.tolist()):
            if length > 32 and length % PAGE == 0:
                page_table[b, length // PAGE] = free.pop(0)
        q = torch.randn(2, HEADS, 1, HEAD_DIM)  # one token each; a model would compute these
        k, v = torch.randn(2, 2, HEADS_KV, 1, HEAD_DIM)
        out = flashtile.attention_with_kvcache(
            q, k_pages, v_pages, cache_seqlens=lengths, page_table=page_table, k=k, v=v, causal=True
        )
        lengths += 1

print(f"{lengths.tolist()} keys in pages {page_table.tolist()}, out {list(out.shape)}")
