"""One fused pair of operations against the same two apart: bytes and launches.

Two operations A and B on each element of a tensor, each a kernel: A reads x and writes y, B reads y and writes z. Four
accesses and two launches. Fused, y is a register: two accesses and one launch, and the same operations. Such kernels
have an intensity far below any machine's ridge, so their time is that of their bytes: fusion halves it.

Here A adds a bias row and B is the ReLU; `softmax_apart` and `softmax_fused` do the same for the scores of attention,
whose scale and mask are two such operations before a softmax. FlashAttention is this idea, carried across a product.

`python -m flashtile_ladder related.fusion` prints bytes, launches and errors.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..measure.counted import count
from ..step04_standard import hide_future

Matrix = Any  # a Tensor, or a Counted one


def bias_relu_apart(x: Matrix, bias: Matrix) -> tuple[Matrix]:
    """relu(x + bias) `[N, D]` by two kernels."""
    y, z = x.new_empty(tuple(x.shape)), x.new_empty(tuple(x.shape))
    y[:] = x[:] + bias[:]  # kernel 1: reads x, writes y
    z[:] = torch.relu(y[:])  # kernel 2: reads y, writes z
    return (z,)


def bias_relu_fused(x: Matrix, bias: Matrix) -> tuple[Matrix]:
    """relu(x + bias) `[N, D]` by one kernel."""
    z = x.new_empty(tuple(x.shape))
    z[:] = torch.relu(x[:] + bias[:])
    return (z,)


def softmax_apart(s: Matrix, scale: float) -> tuple[Matrix]:
    """softmax(mask(scale s)) of scores `[N, N]` by three kernels, causal: six accesses."""
    scaled, masked, p = (s.new_empty(tuple(s.shape)) for _ in range(3))
    scaled[:] = scale * s[:]
    masked[:] = hide_future(scaled[:], True)
    p[:] = torch.softmax(masked[:], dim=1)
    return (p,)


def softmax_fused(s: Matrix, scale: float) -> tuple[Matrix]:
    """The same by one kernel: two accesses."""
    p = s.new_empty(tuple(s.shape))
    p[:] = torch.softmax(hide_future(scale * s[:], True), dim=1)
    return (p,)


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[int, int]]] = {
    "bias and ReLU": (bias_relu_apart, bias_relu_fused, (2, 1)),
    "scale, mask and softmax": (softmax_apart, softmax_fused, (3, 1)),
}


def main() -> None:
    n = 256
    x, bias = torch.randn(n, n), torch.randn(n)
    for name, (apart, fused, launches) in PAIRS.items():
        given = ([x, bias], ()) if name == "bias and ReLU" else ([x], (0.125,))
        results = [count(function, given[0], *given[1]) for function in (apart, fused)]
        (many, (y,)), (few, (z,)) = results
        print(
            f"{name}: {sum(many.values()):,} bytes in {launches[0]} launches, {sum(few.values()):,} in {launches[1]}; "
            f"difference {(y - z).abs().max():.1e}"
        )
