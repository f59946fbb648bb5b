"""A user's score modification applied to one sequence's scores, and its derivatives.

The only place of the oracle where automatic differentiation is used: the function is the user's, so there is no
formula to write. The bound of a tensor's gradient needs the absolute value of each term `ds[i, j] * d score[i,
j] / d tensor[e]`, which a vector-Jacobian product does not show. It is exact here if each score reads at most
one element of each tensor, like a table lookup or a weight for each head: then the Jacobian's only entry for
(i, j) is the directional derivative along ones.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .sums import Sums
from .weights import Weights


class ScoreModification:
    """`fn(score, b, h, q_idx, k_idx, *tensors)` at the scores [H, Sq, Sk] of sequence `batch`, float64."""

    def __init__(self, fn: Callable[..., Tensor], tensors: tuple[Tensor, ...], score: Tensor, batch: int) -> None:
        num_heads_q, seqlen_q, seqlen_k = score.shape
        b = torch.full((1, 1, 1, 1), batch)
        h = torch.arange(num_heads_q)[None, :, None, None]
        q_idx, k_idx = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)

        self._score = score.detach().requires_grad_()
        self._tensors = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in tensors)
        with torch.enable_grad():
            modified = fn(self._score[None], b, h, q_idx, k_idx, *self._tensors).double()
            self._modified = modified.expand(1, num_heads_q, seqlen_q, seqlen_k)[0]
        self.score = self._modified.detach()  # [H, Sq, Sk]
        self.derivative = self._pull(torch.ones_like(self.score), self._score)  # d modified / d score, [H, Sq, Sk]

    def tensor_sums(self, n: int, ds: Weights, p: Tensor, visible: Tensor, A: Tensor, loose: Tensor) -> Sums:
        """Gradient of tensor n for the gradient ds of the modified score; A is the largest of the sequence's rows."""
        tensor = self._tensors[n]
        slope = self._slope(tensor)  # the one entry of the Jacobian's row (i, j)
        squares = ds.root.square()
        if ds.shared is not None:  # (sum_j p x)^2 <= sum_j p x^2, as p sums to at most 1
            squares = squares + ds.shared.square() / p.where(p > 0, 1.0)
        finite_A = A.where(A.isfinite(), 0.0)  # an element that another row's NaN does not reach has a finite bound
        largest = finite_A.max() if A.numel() else torch.zeros((), dtype=A.dtype)
        return Sums(
            total=self._pull(ds.value, tensor),
            absolutes=self._pull(ds.absolute * slope.sign(), tensor).abs(),
            squares=self._pull(squares * slope, tensor).abs(),
            loss=self._pull(ds.losses(visible) * slope.sign(), tensor).abs(),
            A=largest.expand(tensor.shape),
            loose=loose.any().expand(tensor.shape),
        )

    def along(self, tangents: tuple[Tensor | None, ...]) -> Tensor:
        """Directional derivative [H, Sq, Sk] of the modified score along tangents of the tensors."""
        total = torch.zeros_like(self.score)
        for tensor, tangent in zip(self._tensors, tangents, strict=True):
            if tangent is not None:
                total = total + self._slope(tensor, tangent)
        return total

    def _pull(self, cotangent: Tensor, leaf: Tensor) -> Tensor:
        """Vector-Jacobian product of the modified score."""
        if not self._modified.requires_grad:
            return torch.zeros(leaf.shape, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(self._modified, leaf, cotangent, retain_graph=True, allow_unused=True)
        return torch.zeros(leaf.shape, dtype=torch.float64) if gradient is None else gradient

    def _slope(self, tensor: Tensor, direction: Tensor | float = 1.0) -> Tensor:
        """Directional derivative [H, Sq, Sk], by default along ones: J @ d is the derivative of sum(d * J^T g) by g."""
        if not self._modified.requires_grad:
            return torch.zeros_like(self.score)
        with torch.enable_grad():
            g = torch.ones_like(self.score).requires_grad_()
            (pulled,) = torch.autograd.grad(self._modified, tensor, g, create_graph=True, allow_unused=True)
            if pulled is None or not pulled.requires_grad:
                return torch.zeros_like(self.score)
            (slope,) = torch.autograd.grad((direction * pulled).sum(), g, retain_graph=True)
        return slope
