"""Heads over several devices: two products with split weights, and one sum of results (Megatron-LM).

Heads do not know of each other between their projections. So with P devices, each has h / P heads:

    columns of Wq, Wk, Wv      each device makes q, k, v of its own heads from all of x          nothing is sent
    attention                  each device, its own heads                                        nothing is sent
    rows of Wo                 each device multiplies its heads' outputs with its rows of Wo     results are added up

since [O_1 O_2] [W_1; W_2] = O_1 W_1 + O_2 W_2. The sum is an all-reduce of [N, D], one for each layer forward and one
backward: a ring sends 2 (P - 1) / P N D numbers from each device. With groups of heads that share keys, P is at most
the number of key heads, or keys are copied (Shoeybi et al., "Megatron-LM", 2019, section 3).

`python -m flashtile_ladder related.tensor_parallel` prints errors, weights and numbers sent for 1 to 8 devices.
"""

import math

import torch
from torch import Tensor

from .. import step06_flash2


def layer(x: Tensor, w_qkv: Tensor, w_out: Tensor, heads: int) -> Tensor:
    """Attention with projections on one device: x `[N, D]`, w_qkv `[D, 3, h d]`, w_out `[h d, D']` to `[N, D']`."""
    n = len(x)
    q, k, v = ((x @ w_qkv[:, i]).view(n, heads, -1).transpose(0, 1) for i in range(3))  # [h, N, d]
    out = torch.stack([step06_flash2.attention(q[h], k[h], v[h])[0] for h in range(heads)])  # [h, N, d]
    return out.transpose(0, 1).reshape(n, -1) @ w_out


def shards(w_qkv: Tensor, w_out: Tensor, heads: int, devices: int) -> list[tuple[Tensor, Tensor]]:
    """For each device the columns of w_qkv and the rows of w_out of its heads.

    Raises:
        ValueError: the number of heads is not a multiple of that of devices.
    """
    if heads % devices:
        raise ValueError(f"{heads} heads do not go onto {devices} devices; take a divisor")
    size = w_out.shape[0] // devices
    return [(w_qkv[..., i : i + size], w_out[i : i + size]) for i in range(0, w_out.shape[0], size)]


def parallel_layer(x: Tensor, w_qkv: Tensor, w_out: Tensor, heads: int, devices: int) -> Tensor:
    """The same on several devices, here one after the other; the sum is the all-reduce."""
    parts = [layer(x, *shard, heads // devices) for shard in shards(w_qkv, w_out, heads, devices)]
    return torch.stack(parts).sum(dim=0)


def numbers_sent(n: int, width: int, devices: int) -> float:
    """By each device in the all-reduce of a layer's forward pass, as a ring."""
    return 2 * (devices - 1) / devices * n * width


def main() -> None:
    n, heads, d = 64, 8, 16
    width = heads * d
    x, w_qkv, w_out = torch.randn(n, width), torch.randn(width, 3, width), torch.randn(width, width)
    w_qkv, w_out = w_qkv / math.sqrt(width), w_out / math.sqrt(width)
    exact = layer(x.double(), w_qkv.double(), w_out.double(), heads)
    for devices in (1, 2, 4, 8):
        error = (parallel_layer(x, w_qkv, w_out, heads, devices) - exact).abs().max()
        weights = sum(w.numel() for w in shards(w_qkv, w_out, heads, devices)[0])
        sent = numbers_sent(n, width, devices)
        print(f"{devices} devices: {weights:,} weights and {sent:,.0f} numbers sent by each, error {error:.1e}")
