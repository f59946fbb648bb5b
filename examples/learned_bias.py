"""Learn a bias for each distance, as T5 and Swin do. Most fused kernels take no gradient for it, or no bias at all.

The model has to find out that each token copies the one three places before it. Queries and keys know nothing: only
the bias can tell. Its gradient comes from the same backward pass, without a table of all pairs' gradients.
"""

import torch

import flashtile

torch.manual_seed(0)
tokens, reach = 96, 8
table = torch.zeros(1, 2 * reach + 1, requires_grad=True)  # [H, distances], shared by all pairs that far apart
offset = (torch.arange(tokens)[:, None] - torch.arange(tokens)).clamp(-reach, reach) + reach
q = k = torch.zeros(1, 1, tokens, 16)
optimizer = torch.optim.Adam([table], lr=0.3)
for step in range(61):
    v = torch.randn(1, 1, tokens, 16)
    out = flashtile.attention(q, k, v, bias=table[:, offset][None])
    loss = (out[:, :, 3:] - v[:, :, :-3]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
print(f"the bias is largest at distance {table[0].argmax().item() - reach}")
