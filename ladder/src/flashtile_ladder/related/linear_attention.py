"""Linear attention: phi(Q) (phi(K)ᵀ V) in place of softmax(Q Kᵀ) V, O(N) operations, another function.

If the weight of a pair is a product of features, phi(q_i) · phi(k_j), then the sum over keys can be taken first:

    out_i = phi(q_i)ᵀ S / (phi(q_i)ᵀ z)        S = sum_j phi(k_j) v_jᵀ  [f, d]        z = sum_j phi(k_j)  [f]

2 N f d operations for S and as many for the outputs, and no matrix of N x N (Katharopoulos et al., "Transformers are
RNNs", 2020). Causal: S and z grow from row to row, here from block to block, so that decoding needs the state [f, d]
alone, at any length.

With `elu_features`, phi(x) = elu(x) + 1, this is not softmax attention and is not meant to be: a model has to be
trained with it. `random_features` approximate exp(q · k): for w from a normal distribution, exp(q · k) is the mean of
exp(w · q - |q|² / 2) exp(w · k - |k|² / 2) (Choromanski et al., "Rethinking Attention with Performers", 2021, lemma 1).
The error falls as 1 / sqrt(f) and grows with the norms of q and k, exponentially in their squares.

FlashAttention is exact: quadratic in operations, linear in memory. These are linear in both, and not exact.

`python -m flashtile_ladder related.linear_attention` prints error and time against length and against features.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from .. import step06_flash2
from .._host.alone import milliseconds

BLOCK = 64
Features = Callable[[Tensor], Tensor]  # [N, d] to [N, f], positive


def elu_features(x: Tensor) -> Tensor:
    """elu(x) + 1, `[N, d]` to `[N, d]`."""
    return torch.nn.functional.elu(x) + 1


def random_features(d: int, count: int, seed: int = 0, scale: float | None = None) -> Features:
    """`count` positive features whose products have the mean exp(scale q · k)."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(count, d, generator=generator, dtype=torch.float64)
    factor = math.sqrt(1 / math.sqrt(d) if scale is None else scale)

    def features(x: Tensor) -> Tensor:
        x = factor * x
        return torch.exp(x @ w.to(x).mT - (x * x).sum(dim=1, keepdim=True) / 2) / math.sqrt(count)

    return features


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, *, features: Features = elu_features) -> Tensor:
    """`[N, d]` to out `[N, d]` in O(N f d) operations."""
    phi_q, phi_k = features(q), features(k)  # [N, f]
    if not causal:
        return (phi_q @ (phi_k.mT @ v)) / (phi_q @ phi_k.sum(dim=0))[:, None]
    out = torch.empty_like(v)
    s, z = v.new_zeros(phi_k.shape[1], v.shape[1]), v.new_zeros(phi_k.shape[1])  # [f, d], [f]
    for first in range(0, len(q), BLOCK):
        q_i, k_i, v_i = (x[first : first + BLOCK] for x in (phi_q, phi_k, v))  # [B, f], [B, f], [B, d]
        a = (q_i @ k_i.mT).tril()  # [B, B]: pairs inside the block
        out[first : first + BLOCK] = (q_i @ s + a @ v_i) / (q_i @ z + a.sum(dim=1))[:, None]
        s, z = s + k_i.mT @ v_i, z + k_i.sum(dim=0)
    return out


def quadratic(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, *, features: Features = elu_features) -> Tensor:
    """The same by its definition, with weights `[N, N]`: what `attention` has to give."""
    a = features(q) @ features(k).mT  # [N, N]
    a = a.tril() if causal else a
    return (a / a.sum(dim=1, keepdim=True)) @ v


def operations(n: int, d: int, features: int) -> tuple[int, int]:
    """Operations of the products of linear attention, without causal, and of softmax attention."""
    return 2 * n * features * (2 * d + 1), 4 * n**2 * d


def main() -> None:
    d = 64
    for n in (512, 2048, 8192):
        q, k, v = torch.randn(3, n, d)
        exact, _ = step06_flash2.attention(q.double(), k.double(), v.double())
        calls = [functools.partial(function, q, k, v) for function in (attention, step06_flash2.attention)]
        linear, full = (milliseconds(call, q.device) for call in calls)
        print(f"N = {n:>4}: linear {linear:7.2f} ms, softmax {full:7.2f} ms", end="; ")
        print(f"difference {(attention(q, k, v) - exact).norm() / exact.norm():.2f} of the result")
    for count in (16, 64, 256, 1024, 4096):
        error = relative_error(count)
        print(f"{count:>4} random features, q and k half as large: error {error:.3f} of the result")


def relative_error(count: int, n: int = 512, d: int = 64) -> float:
    """Error of random features, in units of the result's norm, for q and k of half the usual size."""
    q, k, v = torch.randn(3, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k = q / 2, k / 2
    exact, _ = step06_flash2.attention(q, k, v)
    return float((attention(q, k, v, features=random_features(d, count)) - exact).norm() / exact.norm())
