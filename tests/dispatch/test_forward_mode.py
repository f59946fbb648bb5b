"""Forward mode: the tangent of every input, against that of the formula. A zero or missing tangent is wrong."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from checking import lengths_on_the_device
from duals import assert_close, of_one, tangents_of_duals
from formula import EXAMPLES, TWO_ROWS, Outputs, dense, everything, packed, randn
from torch import Tensor
from torch.func import grad, jvp, vmap

import flashtile

STILL = {"no keys"}  # examples whose results do not depend on q, k and v


@pytest.mark.parametrize("name", EXAMPLES)
def test_tangent_of_each_input(name: str) -> None:
    """One moving input at a time, so that none can hide behind another; both results."""
    example = EXAMPLES[name]()
    for n, (argument, dx) in enumerate(zip(example.inputs, example.tangents(), strict=True)):
        x = example.tensors[n]
        found, expected = (jvp(of_one(f, example, n), (x,), (dx,)) for f in (example.fused, example.formula))
        assert_close(found, expected)
        moves = any(bool(tangent.any()) for tangent in expected[1])
        assert moves or name.startswith("no keys"), f"{argument} does not move anything: the example tests nothing"


@pytest.mark.parametrize("name", EXAMPLES)
def test_tangents_of_dual_tensors(name: str) -> None:
    """All inputs at once, in torch.autograd's own forward mode."""
    example = EXAMPLES[name]()
    example.scores = TWO_ROWS
    found, expected = (
        tangents_of_duals(f, example.tensors, example.tangents()) for f in (example.fused, example.formula)
    )
    assert_close(found, expected)


@pytest.mark.parametrize("name", ["packed", "packed with everything", "paged"])
def test_lengths_on_the_device(name: str) -> None:
    """The way of a GPU, where the host reads no lengths: gathered rows."""
    example = EXAMPLES[name]()
    with lengths_on_the_device():
        found = jvp(example.fused, example.tensors, example.tangents())
    assert_close(found, jvp(example.formula, example.tensors, example.tangents()))


@pytest.mark.parametrize("name", ["plain", "everything", "packed with everything"])
@pytest.mark.parametrize("tile", [(1, 1), (3, 8), (64, 64)])
def test_any_tile(name: str, tile: tuple[int, int]) -> None:
    example = EXAMPLES[name]()
    example.tile = tile
    found, expected = (jvp(f, example.tensors, example.tangents()) for f in (example.fused, example.formula))
    assert_close(found, expected)


def test_what_is_no_query_and_no_key_moves_nothing() -> None:
    """Tokens of no sequence hold NaN, and so do their tangents."""
    example = packed({"causal": True})
    tensors, tangents = ([x.clone() for x in xs] for xs in (example.tensors, example.tangents()))
    expected = jvp(example.fused, tuple(tensors), tuple(tangents))
    for x in (*tensors, *tangents):
        x[8 if x is tensors[0] or x is tangents[0] else 11 :] = torch.nan
    found = jvp(example.fused, tuple(tensors), tuple(tangents))
    assert_close(found, expected)
    assert not found[1][0][8:].any()


def test_rows_that_see_nothing_stand_still() -> None:
    """Rows 0 to 2 see no key; their tangents are 0, except that lse of a row with a sink is the sink."""
    example = dense({"causal": True}, seqlen_q=7, seqlen_k=4)
    _, (dout, dlse) = jvp(example.fused, example.tensors, example.tangents())
    assert not dout[:, :, :3].any()
    assert not dlse[:, :, :3].any()
    assert dout[:, :, 3:].all()
    with_sinks = EXAMPLES["more queries than keys, and sinks"]()
    _, (dout, dlse) = jvp(with_sinks.fused, with_sinks.tensors, with_sinks.tangents())
    assert not dout[:, :, :3].any()
    assert_close(dlse[:, :, :3], with_sinks.tangents()[-1][:, None].expand(2, 4, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    """Tangents come in the dtypes of the results, and are as exact as those."""
    example = dense({"causal": True, "softcap": 3.0}, sinks=randn(4))
    low = [x.to(dtype) for x in example.tensors]
    rounded = [x.double() for x in low]
    tangents = [x.to(dtype) for x in example.tangents()]
    results = jvp(example.fused, tuple(low), tuple(tangents))
    assert [x.dtype for x in torch.utils._pytree.tree_leaves(results)] == [dtype, torch.float32] * 2
    expected = jvp(example.formula, tuple(rounded), tuple(x.double() for x in tangents))
    for x, y in zip(torch.utils._pytree.tree_leaves(results), torch.utils._pytree.tree_leaves(expected), strict=True):
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(x.double(), y, rtol=2 * eps, atol=8 * eps)


def test_autocast() -> None:
    """q, k and v become bf16; primals, tangents and results stay consistent."""
    example = dense({"causal": True})
    tensors, tangents = (tuple(x.float() for x in xs) for xs in (example.tensors, example.tangents()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = jvp(example.fused, tensors, tangents)
    assert found[0][0].dtype is found[1][0].dtype is torch.bfloat16
    expected = jvp(example.formula, example.tensors, example.tangents())
    assert_close([x.double() for x in found[1]], list(expected[1]), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_named_backend_has_the_same_tangents(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`reference` has no forward mode of its own; its tangents are computed like those of `tiled`."""
    example = everything()
    expected = jvp(example.formula, example.tensors, example.tangents())
    if how == "environment":
        monkeypatch.setenv("FLASHTILE_BACKEND", "reference")
    options = {"backend": "reference" if how == "argument" else "auto"}
    assert_close(jvp(lambda *x: example.fused(*x, **options), example.tensors, example.tangents()), expected)


def passes_of(function: Callable[[], Any]) -> list[str]:
    """The passes that a function runs; nothing of it is computed by the composed derivatives."""
    composed = mock.patch("flashtile.dispatch.derivatives.attention_function", side_effect=AssertionError)
    with composed, flashtile.calls() as counts:
        function()
    return [row.direction for row in counts.rows for _ in range(row.calls)]


def test_each_pass_runs_once() -> None:
    """Outside forward mode a call is one operator. Inside, results and tangents are one pass, and so is backward
    through the results, also where autograd has recorded the tangents (MeanFlow's stop-gradient).
    """
    example = dense()
    tensors, tangents = example.tensors, example.tangents()
    assert passes_of(lambda: example.fused(*tensors)) == ["forward"]
    assert passes_of(lambda: jvp(example.fused, tensors, tangents)) == ["tangents"]
    assert passes_of(lambda: tangents_of_duals(example.fused, tensors, tangents)) == ["tangents"]

    def stopped(q: Tensor) -> Tensor:
        (out, _), (dout, _) = jvp(lambda q: example.fused(q, *tensors[1:]), (q,), tangents[:1])
        return (out - dout.detach()).square().sum()

    assert passes_of(lambda: grad(stopped)(tensors[0])) == ["tangents", "backward"]
    leaf = tensors[0].clone().requires_grad_()
    assert passes_of(lambda: stopped(leaf).backward()) == ["tangents", "backward"]
    both = [x.clone().requires_grad_() for x in tangents]  # the tangents are linear in those of inputs
    assert passes_of(lambda: jvp(example.fused, tensors, tuple(both))[1][0].sum().backward()) == [
        "tangents",
        "backward",
    ]


def test_a_batch_of_directions_shares_the_results() -> None:
    """Directions in a batch share the results: `vmap` may return those unbatched."""
    example = dense({"causal": True})
    q, rest = example.tensors[0], example.tensors[1:]
    directions = torch.stack([randn(*q.shape, seed=n) for n in range(3)])

    def along(function: Callable[..., Outputs], dq: Tensor) -> tuple[Tensor, Tensor]:
        (out, _), (dout, _) = jvp(lambda q: function(q, *rest), (q,), (dq,))
        return out, dout

    found, expected = (
        vmap(lambda dq: along(f, dq), out_dims=(None, 0))(directions)  # noqa: B023
        for f in (example.fused, example.formula)
    )
    assert_close(found, expected)
