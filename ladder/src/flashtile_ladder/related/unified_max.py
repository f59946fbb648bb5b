"""A constant in place of the maximum: parts of the keys that need nothing of each other, and a check.

Split-KV decoding computes parts of a row's keys at the same time. Each part has a maximum of its own, so its sum and
its output have to be corrected when parts are merged. But any number will do as the shift, as long as exp neither
overflows nor vanishes:

    l = sum exp(x - phi)        acc = sum exp(x - phi) v        O = acc / l         for any phi

With one phi for all, parts are added as they are, in any order, with no correction. This holds as long as
x - phi stays in range: phi is chosen from scores of the model, and a row with scores out of range is computed again
with its maximum (Hong et al., "FlashDecoding++", 2023, section 3).

In float32 exp(x - phi) is infinite above 88.7 and loses digits below -87.3, and sums over N keys need room for log N. A
row is taken again unless its largest score is within `RANGE` of phi. Smaller scores than the largest may vanish:
their weights are below exp(-87 + RANGE) of the largest.

`python -m flashtile_ladder related.unified_max` prints errors and rows taken again for small and large scores.
"""

import math

import torch
from torch import Tensor

from .. import step06_flash2
from .._host.shapes import one_shape

RANGE = 40.0  # exp(40) times 2^20 keys times values of 1e6 is 1e30


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *,
    phi: float = 0.0, parts: int = 4,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`[N, d]` to out `[N, d]` and lse `[N]`, the keys in `parts`, all scores shifted by `phi`."""
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    l, acc, m = q.new_zeros(n), torch.zeros_like(q), q.new_full((n,), -math.inf)  # [N], [N, d], [N]
    for keys in step06_flash2.cut(0, n, math.ceil(n / parts)):  # at the same time, on a GPU
        s = step06_flash2.hide_future((scale * q) @ k[keys].mT, slice(0, n), keys, causal)  # [N, keys]
        p = torch.exp(s - phi)
        l, acc = l + p.sum(dim=1), acc + p @ v[keys]  # no factor exp(m - m_new)
        m = torch.maximum(m, s.amax(dim=1))  # for the check alone
    out, lse = acc / l[:, None], phi + torch.log(l)
    again = (m - phi).abs() > RANGE  # [N]
    if bool(again.any()):
        right, right_lse = step06_flash2.attention(q, k, v, causal, scale)
        out[again], lse[again] = right[again], right_lse[again]
    return out, lse


def rows_taken_again(q: Tensor, k: Tensor, scale: float | None = None, phi: float = 0.0) -> int:
    """Number of rows whose largest score is out of range, without causal."""
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    m = (scale * q @ k.mT).amax(dim=1)
    return int(((m - phi).abs() > RANGE).sum())


def main() -> None:
    n, d = 512, 64
    q, k, v = torch.randn(3, n, d)
    for factor in (1, 10, 13, 20):
        s = factor * (q.double() @ k.double().mT) / math.sqrt(d)
        error = (attention(factor * q, k, v)[0] - torch.softmax(s, dim=1) @ v.double()).abs().max()
        again = rows_taken_again(factor * q, k)
        print(f"scores up to {s.abs().max():5.1f}: {again} of {n} rows taken again, error {error:.1e}")
