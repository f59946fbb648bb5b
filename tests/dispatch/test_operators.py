"""The operators that torch sees: schemas, shape formulas, strides and arity."""

import itertools
import random
from typing import Any

import pytest
import torch
from calls import HQ, SQ, B, D, dense_call, everything, paged_call, varlen_call
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import flashtile
from flashtile.call.call import Call, Settings, Tensors, public_lse
from flashtile.dispatch.operators import OPERATORS
from flashtile.testing.layouts import LAYOUTS, lay_out


def arguments_of_backward(call: Call, needs: list[bool] | None = None) -> tuple[Any, ...]:
    operators = OPERATORS["dense" if call.layout == "dense" else "varlen"]
    out, lse = operators.forward(*operators.arguments(call))
    if needs is None:
        needs = [x is not None for x in (*call.tensors[:3], *call.tensors[4:7], *call.tensors.score_mod_tensors)]
    return (
        needs,
        out,
        lse,
        torch.randn_like(out),
        torch.randn_like(public_lse(call, (out, lse))[1]),
        *operators.arguments(call),
    )


# What torch asks of an operator ------------------------------------------------------------------------------------


CALLS = {
    "dense": dense_call(),
    "dense with everything": dense_call(**everything()),
    "varlen": varlen_call(),
    "paged": paged_call(),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_of_forward(name: str) -> None:
    """Schema (no input changed or aliased), shapes, and static and dynamic tracing.

    Without inputs that require a gradient: the operators have none of their own, `autograd` wraps them. What is traced
    with gradients is in test_compile.
    """
    operators = OPERATORS["dense" if CALLS[name].layout == "dense" else "varlen"]
    opcheck(operators.forward, tuple(operators.arguments(CALLS[name])))


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_of_tangents(name: str) -> None:
    operators = OPERATORS["dense" if CALLS[name].layout == "dense" else "varlen"]
    t = CALLS[name].tensors
    moves = [x is not None and x.is_floating_point() for x in (*t[:3], *t[4:7], *t.score_mod_tensors)]
    moving = [x for x, moves in zip((*t[:3], *t[4:7], *t.score_mod_tensors), moves, strict=True) if moves]
    tangents = [torch.randn_like(x) for x in moving]
    opcheck(operators.tangents, (moves, tangents, *operators.arguments(CALLS[name])))


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_of_backward(name: str) -> None:
    operators = OPERATORS["dense" if CALLS[name].layout == "dense" else "varlen"]
    opcheck(operators.backward, arguments_of_backward(CALLS[name]))


def assert_fake_is_real(op: Any, arguments: tuple[Any, ...]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:

        def fake(x: Any) -> Any:
            if isinstance(x, Tensor):
                return mode.from_tensor(x)
            return [fake(part) for part in x] if isinstance(x, list | tuple) else x

        predicted = op(*(fake(x) for x in arguments))
    real = op(*arguments)
    flat = [[*group[:-1], *group[-1]] if isinstance(group[-1], list) else group for group in (predicted, real)]
    for x, y in zip(*flat, strict=True):
        assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
        strides = [
            [stride for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1] for t in (x, y) if t.numel() > 0
        ]
        assert len(strides) == 0 or strides[0] == strides[1]


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_results_have_the_strides_of_real_ones(layout: str, name: str) -> None:
    """A compiler plans with the formulas; a stride that differs corrupts memory."""
    rng = random.Random(
        f"{layout} of {name}"
    )  # combined ones have heads nearer to each other than rows, and features apart
    for call in (dense_call(), dense_call(torch.float16), dense_call(torch.float64), varlen_call(), paged_call()):
        x = lay_out(getattr(call.tensors, name), layout, rng)
        given = call._replace(tensors=call.tensors._replace(**{name: x}))
        operators = OPERATORS["dense" if call.layout == "dense" else "varlen"]
        assert_fake_is_real(operators.forward, tuple(operators.arguments(given)))
        assert_fake_is_real(operators.backward, arguments_of_backward(given))


@pytest.mark.parametrize("shape", itertools.product((0, 1, 2), (1, 2), (0, 1, 3)), ids=str)
def test_fake_results_of_ones_and_zeros(shape: tuple[int, int, int]) -> None:
    """Batch, heads and length of 0 or 1, where strides say little, contiguous and `[B, S, H, D]`."""
    batch, heads, seqlen = shape
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        x = torch.randn([(batch, heads, seqlen, D)[n] for n in order]).permute(order)
        operators = OPERATORS["dense"]
        call = dense_call()._replace(tensors=Tensors(x, x, x))
        assert_fake_is_real(operators.forward, tuple(operators.arguments(call)))
        assert_fake_is_real(operators.backward, arguments_of_backward(call))


def test_out_keeps_the_memory_order_of_q() -> None:
    """The output of `[B, S, H, D]` data flattens to `[B, S, H * D]` without a copy."""
    x = torch.randn(B, SQ, HQ, D).transpose(1, 2)
    out = flashtile.attention(x, x, x)
    assert out.transpose(1, 2).is_contiguous()
    assert flashtile.attention(*[x.contiguous()] * 3).is_contiguous()


def test_arity_is_fixed() -> None:
    """Always seven results, with an empty tensor for each gradient that was not requested."""
    call = dense_call(**everything())
    for needed in range(7):
        needs = [n == needed for n in range(7)]
        *gradients, modified = OPERATORS["dense"].backward(*arguments_of_backward(call, needs))
        assert [x.numel() > 0 for x in (*gradients, *modified)] == needs


def test_results_alias_nothing() -> None:
    call = dense_call()
    out, lse = OPERATORS["dense"].forward(*OPERATORS["dense"].arguments(call))
    storages = {x.untyped_storage().data_ptr() for x in (call.tensors.q, call.tensors.k, call.tensors.v, out, lse)}
    assert len(storages) == 5


def test_settings_and_tensors_travel_through_the_schema() -> None:
    """Every field of a call is an argument of the operators, in order; a new field cannot be forgotten."""
    for layout, operators in OPERATORS.items():
        call = dense_call(**everything()) if layout == "dense" else varlen_call(max_seqlen_q=5)
        call = call._replace(settings=call.settings._replace(b0=1, h0=2, i0=3, j0=4, diagonal=5, num_heads=16))
        back = operators.call(operators.arguments(call))
        assert back.settings == call.settings
        assert all(x is y for x, y in zip(back.tensors[:-1], call.tensors[:-1], strict=True))
        names = [argument.name for argument in operators.forward._schema.arguments]
        missing = {*Tensors._fields, *Settings._fields} - set(names)
        missing -= {"leftpad_k", "out"}  # the KV cache's, and that of plain eager calls
        of_sequences = ("seqused_q", "seqused_k", "page_table", "k_descale", "v_descale")
        assert all("seqlen" in name or name in of_sequences for name in missing)
        assert layout == "dense" or not missing


@pytest.mark.parametrize("name", ["dense", "varlen"])
def test_no_captured_tensors_are_none_or_an_empty_list(name: str) -> None:
    """AOTInductor passes an empty list as `None`; programs that were exported earlier have an empty list."""
    operators = OPERATORS["dense" if CALLS[name].layout == "dense" else "varlen"]
    backward = arguments_of_backward(CALLS[name])
    for op, given in ((operators.forward, tuple(operators.arguments(CALLS[name]))), (operators.backward, backward)):
        place = [argument.name for argument in op._schema.arguments].index("score_mod_tensors")
        assert given[place] is None
        for x, y in zip(op(*given), op(*given[:place], [], *given[place + 1 :]), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_every_scalar_becomes_its_own_setting() -> None:
    """They go by position from a public function to `new_settings`: keywords would take 2 microseconds more."""
    given = {"causal": "top_left", "window": (3, 4), "scale": 0.3, "softcap": 2.0, "dropout_p": 0.1, "max_seqlen_q": 11}
    given |= {"max_seqlen_k": 12, "num_splits": 7, "deterministic": True, "backend": "tiled", "attention_chunk": 9}
    assert varlen_call(**given).settings == Settings(
        scale=0.3,
        softcap=2.0,
        window_left=3,
        window_right=4,
        top_left=True,
        attention_chunk=9,
        dropout_p=0.1,
        max_seqlen_q=11,
        max_seqlen_k=12,
        num_splits=7,
        deterministic=True,
        backend="tiled",
    )
