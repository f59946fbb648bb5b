"""A score modification with a parameter of its own: each head learns how fast attention fades with distance."""

import torch
from torch import Tensor

import flashtile


def fade(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, rate: Tensor) -> Tensor:
    return score - rate[h] * (q_idx - k_idx).abs()


torch.manual_seed(0)
q, k, v = (torch.randn(1, 4, 64, 32) for _ in range(3))
goal = torch.tensor([0.0, 0.1, 0.2, 0.4])  # one rate for each head
target = flashtile.attention(q, k, v, score_mod=flashtile.ScoreMod(fade, (goal,)))

rate = torch.full((4,), 0.15, requires_grad=True)
optimizer = torch.optim.Adam([rate], lr=0.04)
for _ in range(30):
    loss = (flashtile.attention(q, k, v, score_mod=flashtile.ScoreMod(fade, (rate,))) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rates {[round(x, 2) for x in rate.tolist()]}, the target's are {[round(x, 2) for x in goal.tolist()]}")
