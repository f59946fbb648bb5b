"""Tensors that functions of pairs read: of other types than when they were traced, and with other values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import ArgumentError, BlockMask, MaskMod, ScoreMod
from flashtile.call.call import Call, Settings, Tensors
from flashtile.dispatch.operators import OPERATORS

Q, K, V = (torch.randn(1, 4, 9, 8) for _ in range(3))


def table_mod(table: Tensor) -> ScoreMod:
    return ScoreMod(lambda s, b, h, i, j, t: s + t[h, (i - j).clamp(0, 4)], (table,))


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(4, 5))


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_converted_module(dtype: torch.dtype, backend: str) -> None:
    """Which changes its parameters in place, below a ScoreMod that was called already."""
    module = Table()
    mod, mask = table_mod(module.table), MaskMod(lambda b, h, i, j: (i - j) * module.table[h, 2] > -9)
    for _ in range(3):
        flashtile.attention(Q, K, V, score_mod=mod, mask=mask, backend=backend)
    module.to(dtype)
    q, k, v = (x.to(dtype) for x in (Q, K, V))
    again = MaskMod(lambda b, h, i, j: (i - j) * module.table[h, 2] > -9)
    for _ in range(3):
        out = flashtile.attention(q, k, v, score_mod=mod, mask=mask, backend=backend)
        expected = flashtile.attention(q, k, v, score_mod=table_mod(module.table), mask=again, backend=backend)
        assert torch.equal(out, expected)
    gradients = [torch.autograd.grad(x.sum(), module.table)[0] for x in (out, expected)]
    assert torch.equal(*gradients)


def test_a_converted_module_in_a_graph() -> None:
    module = Table()
    mod = table_mod(module.table)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, score_mod=mod)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(Q, K, V), flashtile.attention(Q, K, V, score_mod=mod))
    module.double()
    x = [x.double() for x in (Q, K, V)]
    torch.testing.assert_close(compiled(*x), flashtile.attention(*x, score_mod=table_mod(module.table)))


def test_tensors_of_a_mod_that_are_replaced() -> None:
    """Those of the same kind are read; others are refused, also as parts of a combined mask."""
    lengths = torch.tensor([7])
    mask = MaskMod(lambda b, h, i, j, n: j < n[b], (lengths,))
    expected = flashtile.attention(Q, K, V, mask=mask)
    mask.tensors = (lengths.to(torch.uint8),)
    assert torch.equal(flashtile.attention(Q, K, V, mask=mask), expected)
    assert torch.equal(flashtile.attention(Q, K, V, mask=flashtile.mask_mods.and_masks(mask, mask)), expected)
    for wrong in ((torch.zeros(1, 3, dtype=torch.int64),), (torch.ones(1),), (lengths, lengths), (), (lengths > 0,)):
        mask.tensors = wrong
        with pytest.raises(ArgumentError, match=r"`mask\.tensors`.*\n.*\(int64 with 1 dimensions\)"):
            flashtile.attention(Q, K, V, mask=mask)
        with pytest.raises(ArgumentError, match=r"`mask\.tensors`"):
            flashtile.mask_mods.or_masks(mask, mask)


@pytest.mark.parametrize(
    "change",
    [
        Tensor.double, Tensor.bfloat16, Tensor.int, Tensor.to_sparse,
        lambda x: x[None], lambda x: x[0], lambda x: x[:3],
    ],
)  # fmt: skip
@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_operators_refuse_other_tensors(change: Callable[[Tensor], Tensor], passes: str) -> None:
    """In a program, which has the formula as it was traced."""
    table = torch.randn(4, 5)
    mod, operators = table_mod(table), OPERATORS["dense"]

    def run(tensors: list[Tensor], mask: str | None = None, of_mask: int = 0) -> Any:
        settings = Settings(scale=1.0, score_mod=None if mask else mod.key, mask_mod=mask, num_mask_tensors=of_mask)
        arguments = operators.arguments(Call(Tensors(Q, K, V, score_mod_tensors=tensors), settings))
        if passes == "forward":
            return operators.forward(*arguments)
        out, lse = torch.zeros_like(Q), torch.zeros(1, 4, 9)
        return operators.backward([True] * 3 + [False] * (3 + len(tensors)), out, lse, out, None, *arguments)

    run([table])
    for tensors in ([change(table)], [], [table, table]):
        with pytest.raises(ArgumentError, match=r"`score_mod\.tensors"):
            run(tensors)
    mask = MaskMod(lambda b, h, i, j, n: j < n[b], (torch.ones(1),))
    for count in (0, 2, -1):
        with pytest.raises(ArgumentError, match=r"`mask\.tensors"):
            run([torch.ones(1)], mask.key, count)


@pytest.mark.parametrize(
    "factor",
    [
        lambda w, h: torch.tanh(w[0]), lambda w, h: (w[1] * 2 + 1).exp(), lambda w, h: torch.where(w[0] > 0, w[0], -1),
        lambda w, h: torch.exp(w)[h], lambda w, h: (w / w.sum())[h], lambda w, h: w.max(), lambda w, h: w[1:].mean(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("given", [ScoreMod, lambda fn: fn], ids=["ScoreMod", "function"])
def test_what_is_computed_from_a_tensor_stays_live(factor: Callable[..., Tensor], given: Callable[..., Any]) -> None:
    """In the next training step it has the new values, and gradients again."""
    w = torch.nn.Parameter(torch.tensor([0.5, 0.2, 0.9, 0.4]))
    mod = given(lambda s, b, h, i, j: s * factor(w, h))
    for _ in range(3):
        out = flashtile.attention(Q, K, V, score_mod=mod)
        s = Q @ K.mT * 8**-0.5 * factor(w, torch.arange(4)).view(-1, 1, 1)
        expected = torch.softmax(s, -1) @ V
        torch.testing.assert_close(out, expected)
        gradients = [torch.autograd.grad(x.square().sum(), w)[0] for x in (out, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            w.add_(0.3)


def test_masks_of_computed_lengths() -> None:
    """Alone, within others, and asked for by Python."""
    lengths = torch.tensor([3, 5])

    def fn(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < lengths.max()

    every = torch.ones(1, 1, 1, 1, dtype=torch.int64)
    masks = {
        "mod": MaskMod(fn),
        "combined": flashtile.mask_mods.and_masks(fn, MaskMod(lambda b, h, i, j: j >= 0)),
        "blocks": BlockMask(every[..., 0], 0 * every, block_size=(9, 9), mask=fn),
        "item": MaskMod(lambda b, h, i, j: j < lengths.max().item()),
        "branch": MaskMod(lambda b, h, i, j: (j < 5) if lengths[1] == 5 else (j < 8)),
    }
    for length in (5, 8):
        lengths[1] = length
        expected = flashtile.attention(Q, K, V, mask=torch.arange(9)[None, None, None] < length)
        for name, mask in masks.items():
            assert torch.equal(flashtile.attention(Q, K, V, mask=mask), expected), name
    assert not masks["mod"].traced
    assert "`max` reads the values of a whole tensor" in str(masks["mod"])


def test_a_function_of_whole_tensors_in_a_graph() -> None:
    """The call breaks the graph, as that of a bare function; single numbers are a part of it."""
    w = torch.nn.Parameter(torch.rand(4))
    whole, single = (ScoreMod(lambda s, b, h, i, j, f=f: s * f(w)) for f in (lambda w: w.sum(), lambda w: w[0].exp()))
    for mod in (whole, single):

        def call(q: Tensor, mod: ScoreMod = mod) -> Tensor:
            return flashtile.attention(q, K, V, score_mod=mod)

        compiled = torch.compile(call, backend="aot_eager", fullgraph=mod is single)
        for _ in range(2):
            torch.testing.assert_close(compiled(Q), call(Q))
            torch.testing.assert_close(*(torch.autograd.grad(f(Q).sum(), w)[0] for f in (compiled, call)))
            with torch.no_grad():
                w.add_(0.5)
    with pytest.raises(RuntimeError, match="computes from whole tensors"):
        torch.compile(lambda q: flashtile.attention(q, K, V, score_mod=whole), backend="eager", fullgraph=True)(Q)
