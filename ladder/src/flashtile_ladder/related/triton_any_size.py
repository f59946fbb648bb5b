"""Step 8's kernels for any size: any N of rows and of keys, any d, any strides; with three softmaxes.

step08_triton_lite.py and step08_triton_online.py take N in multiples of 64, d that is a tile's width, and contiguous
tensors, so that their loops have no mask. A general kernel needs three things more.

- Rows and keys beyond N are masked. A key that is not there must have the score -inf and not 0: a score of 0 takes part
  in the softmax.
- Columns beyond d are masked. The tile is BLOCK_D wide, the next power of two and at least 16 (`tl.dot` takes no less).
  Columns of zeros add nothing to a product, so only loads and stores need this mask.
- Strides are arguments: a head of a `[N, heads, d]` tensor need not be copied first.

`SOFTMAX` is a constant. "lite" is each tile's own softmax, which is attention only if all keys are in one; "online" is
step 6's. "running lse" carries lse in the place of l, in as many numbers, and takes a logarithm for each tile where
"online" takes one in all: nothing is saved, and running_lse.py measures what it costs.

    lse = m_new + log(exp(lse - m_new) + rowsum(P))          at the end: O = exp(m - lse) acc

Limits: d up to 128, forward only. `TRITON_INTERPRET=1 python -m flashtile_ladder related.triton_any_size` prints errors
of all three.
"""
# pyright: reportInvalidTypeForm=false

import math

import torch
from torch import Tensor

from .._host.shapes import two_lengths
from .._host.triton_or_not import TritonUnavailableError, on, tl, triton, unavailable

BLOCK_M, BLOCK_N = 64, 64
LARGEST_D = 128
SOFTMAXES = ("lite", "online", "running lse")


@triton.jit
def kernel(
    Q, K, V, O, LSE, rows_in_all, keys_in_all, d, scale, q_row, q_col, k_row, k_col, v_row, v_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Strides are in elements."""
    first_row = tl.program_id(0) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = (rows[:, None] < rows_in_all) & (cols[None, :] < d)  # [BLOCK_M, BLOCK_D]
    q = tl.load(Q + rows[:, None] * q_row + cols[None, :] * q_col, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)
    lse = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    end = tl.minimum(first_row + BLOCK_M, keys_in_all) if CAUSAL else keys_in_all
    for start in range(0, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        there = (keys[:, None] < keys_in_all) & (cols[None, :] < d)  # [BLOCK_N, BLOCK_D]
        k = tl.load(K + keys[:, None] * k_row + cols[None, :] * k_col, mask=there, other=0.0)  # [BLOCK_N, BLOCK_D]
        v = tl.load(V + keys[:, None] * v_row + cols[None, :] * v_col, mask=there, other=0.0)  # [BLOCK_N, BLOCK_D]
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        visible = keys[None, :] < keys_in_all
        if CAUSAL:
            visible = visible & (keys[None, :] <= rows[:, None])
        s = tl.where(visible, s, float("-inf"))
        if SOFTMAX == "lite":
            p = tl.exp(s - tl.max(s, axis=1)[:, None])  # [BLOCK_M, BLOCK_N]
            p = p / tl.sum(p, axis=1)[:, None]
        else:
            m_new = tl.maximum(m, tl.max(s, axis=1))  # [BLOCK_M]
            alpha = tl.exp(m - m_new)  # [BLOCK_M]
            p = tl.exp(s - m_new[:, None])  # [BLOCK_M, BLOCK_N]
            if SOFTMAX == "online":
                l = l * alpha + tl.sum(p, axis=1)  # [BLOCK_M]
            else:
                lse = m_new + tl.log(tl.exp(lse - m_new) + tl.sum(p, axis=1))  # [BLOCK_M]
            acc = acc * alpha[:, None]
            m = m_new
        acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
    if SOFTMAX == "online":
        acc = acc / l[:, None]
        lse = m + tl.log(l)
    if SOFTMAX == "running lse":
        acc = acc * tl.exp(m - lse)[:, None]
    tl.store(O + rows[:, None] * d + cols[None, :], acc.to(q.dtype), mask=inside)
    tl.store(LSE + rows, lse, mask=rows < rows_in_all)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *, softmax: str = "online"
) -> tuple[Tensor, Tensor | None]:
    """q `[Nq, d]`, k and v `[Nk, d]`, of any strides, to out `[Nq, d]` and lse `[Nq]` in float32.

    `softmax` is one of `SOFTMAXES`; "lite" has no lse (`None`), and is right for Nk up to 64 and wrong beyond.

    Raises:
        TritonUnavailableError: Triton is missing, or there is neither a GPU nor its interpreter.
        ValueError: a shape or dtype outside the limits above, or causal with other lengths of q and k, or in "lite".
    """
    reason = unavailable(kernel, q.device)
    if reason is not None:
        raise TritonUnavailableError(f"this file of the ladder is Triton, which cannot run this call: {reason}")
    two_lengths(q, k, v, largest_d=LARGEST_D, dtypes=(torch.float16, torch.float32), causal=causal)
    if softmax not in SOFTMAXES or (causal and softmax == "lite"):
        raise ValueError(f"softmax={softmax!r}, causal={causal}; one of {SOFTMAXES}, causal not in lite")
    n, d = q.shape
    scale = 1 / math.sqrt(d) if scale is None else scale
    out = torch.empty((n, d), dtype=q.dtype, device=q.device)
    lse = torch.empty(n, dtype=torch.float32, device=q.device)
    sizes, strides = (n, len(k), d, scale), (*q.stride(), *k.stride(), *v.stride())
    constants = BLOCK_M, BLOCK_N, max(16, 1 << (d - 1).bit_length()), causal, softmax
    with on(q.device):
        kernel[((n + BLOCK_M - 1) // BLOCK_M,)](q, k, v, out, lse, *sizes, *strides, *constants, num_stages=2)
    return out, None if softmax == "lite" else lse


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for n, d in ((8, 16), (16, 16), (32, 16), (64, 16), (100, 24), (200, 80)):
        q, k, v = torch.randn(3, n, d, device=device)
        exact = torch.softmax(q.double() @ k.double().mT / math.sqrt(d), dim=1) @ v.double()  # [N, d]
        errors = {x: float((attention(q, k, v, softmax=x)[0] - exact).abs().max()) for x in SOFTMAXES}
        print(f"N = {n:>3}, d = {d:>2}: error of", ", of ".join(f"{name} {x:.1e}" for name, x in errors.items()))
