"""Forward mode of score_mods, whose tensors are found wherever the function has them."""

from collections.abc import Callable

import pytest
import torch
from duals import assert_close, tangents_of_duals
from formula import Outputs, dense, randn
from torch import Tensor
from torch.func import grad, jvp

import flashtile


class Holder:
    """An object in which a score_mod hides a tensor."""

    w: Tensor


HOLDER = Holder()
UNDECLARED: dict[str, Callable[[Tensor], Callable[..., Tensor]]] = {
    "a list": lambda w: (lambda box: lambda score, b, h, i, j: score * box[0][h])([w]),
    "a default argument": lambda w: lambda score, b, h, i, j, w=w: score * w[h],
    "an attribute": lambda w: setattr(HOLDER, "w", w) or (lambda score, b, h, i, j: score * HOLDER.w[h]),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("where", UNDECLARED)
@pytest.mark.parametrize("mode", ["jvp", "duals", "grad", "backward"])
def test_score_mod_finds_tensors(where: str, mode: str) -> None:
    """Wherever a function that can be traced reads them. Otherwise the derivative would be lost, which raises."""
    example = dense()

    def call(w: Tensor) -> Outputs:
        return flashtile.attention(*example.tensors, score_mod=UNDECLARED[where](w), return_lse=True)

    def untraceable(w: Tensor) -> Outputs:
        fn = UNDECLARED[where](w)
        return flashtile.attention(
            *example.tensors, score_mod=lambda *x: fn(*x) + torch.sinh(x[0]), return_lse=True, backend="tiled"
        )

    def formula(w: Tensor) -> Outputs:
        return example.formula(example.tensors[0] * w[:, None, None], *example.tensors[1:])

    w, dw = randn(4), randn(4, seed=1)
    run = {
        "jvp": lambda call: jvp(call, (w,), (dw,)),
        "duals": lambda call: tangents_of_duals(call, (w,), (dw,)),
        "grad": lambda call: grad(lambda w: call(w)[0].sum())(w),
        "backward": lambda call: torch.autograd.grad(call(leaf := w.clone().requires_grad_())[0].sum(), leaf),
    }[mode]
    assert_close(run(call), run(formula))
    with pytest.raises(flashtile.AttentionError, match="score_mod"):
        run(untraceable)


def test_score_mod_with_a_captured_tensor() -> None:
    """A tensor in the closure of a bare function is found."""
    example = dense()

    def fused(w: Tensor) -> Outputs:
        return flashtile.attention(*example.tensors, score_mod=lambda s, b, h, i, j: s * w[h], return_lse=True)

    def formula(w: Tensor) -> Outputs:
        return example.formula(example.tensors[0] * w[:, None, None], *example.tensors[1:])

    w, dw = randn(4), randn(4, seed=1)
    assert_close(jvp(fused, (w,), (dw,)), jvp(formula, (w,), (dw,)))
    assert_close(tangents_of_duals(fused, (w,), (dw,)), tangents_of_duals(formula, (w,), (dw,)))
