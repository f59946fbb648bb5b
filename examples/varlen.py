"""Sequences of different lengths in one call, packed one after another, with no padding."""

import torch

import flashtile

lengths = [5, 120, 37]
sequences = [torch.randn(n, 8, 64, requires_grad=True) for n in lengths]  # [tokens, heads, head_dim] each
x = torch.cat(sequences)  # [Tq, H, D]
cu_seqlens = torch.tensor([0, 5, 125, 162], dtype=torch.int32)  # where each begins, and where the last ends

out = flashtile.attention_varlen(x, x, x, cu_seqlens, cu_seqlens, max_seqlen_q=120, max_seqlen_k=120, causal=True)
out.square().sum().backward()

for sequence, part in zip(sequences, out.split(lengths), strict=True):
    dense = sequence.transpose(0, 1)[None]  # [1, H, S, D]
    alone = flashtile.attention(dense, dense, dense, causal=True)[0].transpose(0, 1)
    torch.testing.assert_close(part, alone)  # each sequence sees itself alone
    assert sequence.grad is not None
    print(f"{len(sequence)} tokens: as in a call of their own, gradient {list(sequence.grad.shape)}")
