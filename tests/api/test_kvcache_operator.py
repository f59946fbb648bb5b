"""attention_with_kvcache: its operator, and the derivatives that it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cached import (
    CACHES,
    Arguments,
    angles,
    call_in_place,
    int32,
    problem,
    run,
    same_bits,
    tokens_of,
)
from checking import lengths_on_the_device
from no_reads import NoReads
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import flashtile
from flashtile import AttentionError
from flashtile.testing.case import Case
from flashtile.testing.eight_bit import with_eight_bits


def operator_calls() -> dict[str, Arguments]:
    cos, sin = angles(12, 8)
    rotary = {"rotary_cos": cos, "rotary_sin": sin}
    mod = flashtile.ScoreMod(lambda score, b, h, i, j, w: score * w[h], (torch.rand(4),))
    features = {"bias": torch.randn(1, 4, 2, 12), "sinks": torch.randn(4), "dropout_p": 0.5, "dropout_seed": 3}
    return {
        "dense": problem(leftpad_k=int32(1, 0, 2), cache_batch_idx=int32(2, 0, 1), **rotary),
        "pages": problem(page_size=3, causal=True, num_splits=2),
        "packed": problem(new=(2, 0, 1), page_size=3, **rotary),
        "features": problem(score_mod=mod, softcap=2.0, window=(4, 0), alibi_slopes=torch.rand(4), **features),
        "nothing to append": problem(new=None, queries=3),
        "8 bits": with_eight_bits(Case("attention_with_kvcache", problem()), torch.int8, "tokens", "heads").arguments,
    }


def operator_arguments(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Arguments that the public function passes to its operator."""
    seen: list[tuple[Any, ...]] = []

    def operator(*given: Any) -> tuple[Tensor, Tensor]:
        seen.append(given)
        return torch.empty(0), torch.empty(0)

    with monkeypatch.context() as patch:
        patch.setattr("flashtile.api.normalize.is_plain_eager", lambda *_: False)
        patch.setattr(torch.ops.flashtile.attention_with_kvcache, "default", operator)
        call_in_place(arguments)
    return seen[0]


@pytest.mark.parametrize("name", operator_calls())
def test_opcheck(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema (what is written is declared, nothing is aliased), shapes, static and dynamic tracing."""
    given = operator_arguments(operator_calls()[name], monkeypatch)
    given = tuple(x.nan_to_num() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given)
    opcheck(torch.ops.flashtile.attention_with_kvcache.default, given)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize("name", operator_calls())
def test_fake_results_are_like_real_ones(name: str, order: tuple[int, ...]) -> None:
    """Shapes, dtypes and strides, for q in any order of memory; a compiler plans with them."""
    arguments = operator_calls()[name]
    if arguments["q"].dim() == 4:
        inverse = [order.index(n) for n in range(4)]
        arguments["q"] = arguments["q"].permute(order).contiguous().permute(inverse)
    real = run(arguments)[:2]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in arguments.items()}
        predicted = flashtile.attention_with_kvcache(**fake, return_lse=True)
    for x, y in zip(predicted, real, strict=True):
        assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
        assert x.stride() == y.stride()


@pytest.mark.parametrize("name", operator_calls())
def test_nothing_is_read_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the operator, which would hide its operations."""
    from flashtile.dispatch import cache_operator

    given = operator_arguments(operator_calls()[name], monkeypatch)
    monkeypatch.setattr(Tensor, "tolist", lambda _: pytest.fail("tolist reads values on the host"))
    with lengths_on_the_device(), NoReads():
        out, _ = cache_operator.run(*given)
    assert tokens_of(out).shape[1] == 4


def refused(arguments: Arguments, call: Callable[[Arguments], Any]) -> None:
    """An error of ours, and untouched caches."""
    before = {name: arguments[name].clone() for name in CACHES}
    with pytest.raises(AttentionError, match="attention_with_kvcache"):
        call(arguments)
    assert all(same_bits(arguments[name].detach(), before[name]) for name in CACHES)


@pytest.mark.parametrize("name", ["q", "k", "v", "k_cache", "v_cache", "bias", "sinks", "rotary_cos"])
def test_arguments_that_require_a_gradient(name: str) -> None:
    cos, sin = angles(12, 8)
    arguments = problem(rotary_cos=cos, rotary_sin=sin, sinks=torch.ones(4), bias=torch.ones(1, 1, 1, 12))
    arguments[name] = arguments[name].clone().requires_grad_()
    refused(arguments, call_in_place)
    with torch.no_grad():
        call_in_place(arguments)


def test_score_mod_that_requires_a_gradient() -> None:
    weight = torch.ones(4, requires_grad=True)
    mod = flashtile.ScoreMod(lambda score, b, h, i, j, w: score * w[h], (weight,))
    refused(problem(score_mod=mod), call_in_place)


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, q: torch.func.grad(lambda q: f(q).sum())(q),
    "vjp": lambda f, q: torch.func.vjp(f, q),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (q,)),
    "vmap": lambda f, q: torch.func.vmap(f)(torch.stack((q, q))),
    "vmap of grad": lambda f, q: torch.func.vmap(torch.func.grad(lambda q: f(q).sum()))(torch.stack((q, q))),
    "grad of vmap": lambda f, q: torch.func.grad(lambda q: torch.func.vmap(f)(q).sum())(torch.stack((q, q))),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused(name: str) -> None:
    refused(problem(), lambda x: TRANSFORMS[name](lambda q: call_in_place(x | {"q": q}), x["q"]))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("inside", [True, False])
def test_compiled_transforms_are_refused(name: str, inside: bool) -> None:
    """Compiled around a transform or under one: any error will do, but no zero derivative."""
    arguments = problem()

    def call(q: Tensor) -> Tensor:
        return flashtile.attention_with_kvcache(**arguments | {"q": q})

    def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(f, backend="aot_eager")

    def run() -> Any:
        if inside:
            return compiled(lambda q: TRANSFORMS[name](call, q))(arguments["q"])
        return TRANSFORMS[name](compiled(call), arguments["q"])

    with pytest.raises((AttentionError, RuntimeError)):
        run()


@pytest.mark.parametrize("how", ["make_fx", "export"])
@pytest.mark.parametrize("name", [*TRANSFORMS, "requires_grad"])
def test_traced_programs_are_refused(name: str, how: str) -> None:
    """Where none of our Python is left but the operator's."""
    arguments = problem()

    class Program(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return flashtile.attention_with_kvcache(**arguments | {"q": q})  # type: ignore[return-value]

    q = arguments["q"]
    program = make_fx(Program())(q) if how == "make_fx" else torch.export.export(Program(), (q,)).module()
    torch.testing.assert_close(program(q), run(arguments).out)
    transformed = TRANSFORMS.get(name, lambda f, q: f(q.clone().requires_grad_()))
    with pytest.raises(AttentionError, match="attention_with_kvcache"):
        transformed(program, q)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["q", "k", "sinks"])
def test_compiled_arguments_that_require_a_gradient(name: str) -> None:
    arguments = problem(sinks=torch.ones(4))
    arguments[name].requires_grad_()
    with pytest.raises((AttentionError, torch._dynamo.exc.TorchDynamoException)):
        torch.compile(call_in_place, backend="aot_eager")(arguments).sum().backward()
