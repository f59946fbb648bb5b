"""The operators that torch sees: schemas, shape formulas for tracing, autograd, and the way down to a backend.

Each layout has one forward and one backward operator, so that `torch.compile`, `torch.export` and graph capture see
single opaque calls. Inside them, below Dynamo, a call becomes a problem, a plan, and a backend's kernels.
"""

import contextlib
import types
from collections.abc import Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor

from .call import Call, Gradients, Needs, Settings, Tensors, new_rows
from .errors import AttentionError
from .plan import plan
from .problem import Problem, accumulation_dtype

LIBRARY = torch.library.Library("flashtile", "DEF")
VARLEN_ONLY = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table", "max_seqlen_q", "max_seqlen_k")
SCHEMA_TYPES = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", str: "str", Sequence[Tensor]: "Tensor[]"}


def schema(fields: type, layout: str) -> list[str]:
    """The schema arguments of `Tensors` or `Settings`, as far as the layout has them."""
    arguments = []
    for name, hint in get_type_hints(fields).items():
        if layout == "dense" and name in VARLEN_ONLY:
            continue
        optional = isinstance(hint, types.UnionType)
        kind = SCHEMA_TYPES[hint.__args__[0] if optional else hint]
        optional = optional and not (layout == "varlen" and name == "cu_seqlens_q")
        arguments.append(f"{kind}{'?' * optional} {name}")
    return arguments


class Operators:
    """The forward and backward operator of one layout."""

    def __init__(self, layout: str):
        self.layout = layout
        self.name = {"dense": "attention", "varlen": "attention_varlen"}[layout]
        self.fields = [s.split()[-1] for s in (*schema(Tensors, layout), *schema(Settings, layout))]
        call = ", ".join((*schema(Tensors, layout), *schema(Settings, layout)))
        gradients = "Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dalibi_slopes, Tensor dsinks, Tensor[] dmod"
        LIBRARY.define(f"{self.name}_forward({call}) -> (Tensor out, Tensor lse)")
        LIBRARY.define(
            f"{self.name}_backward(bool[] needs, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, {call})"
            f" -> ({gradients})"
        )
        LIBRARY.impl(f"{self.name}_forward", self.run_forward, "CompositeExplicitAutograd")
        LIBRARY.impl(f"{self.name}_backward", self.run_backward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"flashtile::{self.name}_forward", self.fake_forward, lib=LIBRARY)
        torch.library.register_fake(f"flashtile::{self.name}_backward", self.fake_backward, lib=LIBRARY)
        for operator in ("forward", "backward"):
            torch.library.register_vmap(f"flashtile::{self.name}_{operator}", refuse_vmap, lib=LIBRARY)
        self.forward = getattr(torch.ops.flashtile, f"{self.name}_forward").default
        self.backward = getattr(torch.ops.flashtile, f"{self.name}_backward").default

    def arguments(self, call: Call) -> list[Any]:
        """A call as the operators take it."""
        values = call.tensors._asdict() | call.settings._asdict()
        return [values[name] for name in self.fields]

    def call(self, arguments: Sequence[Any]) -> Call:
        """The inverse of `arguments`."""
        values = dict(zip(self.fields, arguments, strict=True))
        tensors = {name: values.pop(name) for name in Tensors._fields if name in values}
        return Call(Tensors(**tensors), Settings(**values))

    def run_forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        call = self.call(arguments)
        q = call.tensors.q
        chosen = plan(Problem.describe(call), q.device, call.settings.backend)
        with without_autocast(q.device.type):
            return chosen.kernels().forward(chosen, call)

    def run_backward(
        self, needs: list[bool], out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, *arguments: Any
    ) -> tuple[Any, ...]:
        call = self.call(arguments)
        q = call.tensors.q
        chosen = plan(Problem.describe(call), q.device, call.settings.backend)
        with without_autocast(q.device.type):
            wanted = Needs(*needs[:6], score_mod_tensors=tuple(needs[6:]))
            found = chosen.kernels().backward(chosen, call, wanted, out, lse, dout, dlse)
        return in_schema(found, call)

    def fake_forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        q, v = self.call(arguments).tensors.q, self.call(arguments).tensors.v
        out = new_rows(q, q.shape[1], v.shape[-1], q.dtype)
        shape = q.shape[:-1] if self.layout == "dense" else (q.shape[1], q.shape[0])
        return out, q.new_empty(shape, dtype=accumulation_dtype(q.dtype))

    def fake_backward(
        self, needs: list[bool], out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, *arguments: Any
    ) -> tuple[Any, ...]:
        call = self.call(arguments)
        t = call.tensors
        features = (t.bias, t.alibi_slopes, t.sinks, *t.score_mod_tensors)
        found = []
        for x, needed in zip((t.q, t.k, t.v, *features), needs, strict=True):
            if x is None or not needed:
                found.append(None)
            elif self.layout == "dense" and len(found) < 3:
                found.append(new_rows(x, x.shape[1], x.shape[-1], x.dtype))
            else:
                found.append(x.new_empty(x.shape))
        return in_schema(Gradients(*found[:6], score_mod_tensors=tuple(found[6:])), call)


def refuse_vmap(*_: Any) -> Any:
    raise AttentionError(
        "torch.vmap over attention is not there yet.\n"
        "  accepted: the batch as the first dimension of q, k and v: flashtile.attention(q, k, v)"
    )


def in_schema(gradients: Gradients, call: Call) -> tuple[Any, ...]:
    """Gradients as a schema of fixed arity returns them: in their inputs' dtypes, an empty tensor for what nobody
    asked for.
    """
    t = call.tensors

    def given(gradient: Tensor | None, x: Tensor | None) -> Tensor:
        return t.q.new_empty(0) if gradient is None or x is None else gradient.to(x.dtype)

    inputs = (t.q, t.k, t.v, t.bias, t.alibi_slopes, t.sinks)
    modifiers = gradients.score_mod_tensors or (None,) * len(t.score_mod_tensors)
    return (
        *(given(gradient, x) for gradient, x in zip(gradients[:6], inputs, strict=True)),
        [given(gradient, x) for gradient, x in zip(modifiers, t.score_mod_tensors, strict=True)],
    )


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """The operators' own products keep their dtypes; autocast has already acted on the arguments, in `api`."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


OPERATORS = {layout: Operators(layout) for layout in ("dense", "varlen")}
FLAT_FIELDS = Tensors._fields[:-1]
DIFFERENTIABLE = tuple(FLAT_FIELDS.index(name) for name in Needs._fields[:6])


def run_backward(layout: str, settings: Settings, needs: list[bool], *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The backward operator on `out, lse, dout, dlse` and the flat tensors of a call."""
    operators = OPERATORS[layout]
    arguments = operators.arguments(Call(Tensors.from_flat(tensors[4:]), settings))
    *found, modified = operators.backward(needs, *tensors[:4], *arguments)
    return *found, *modified


class Attention(torch.autograd.Function):
    """Autograd of both layouts; `tensors` is `Tensors.flat()`."""

    @staticmethod
    def vmap(*arguments: Any) -> Any:
        return refuse_vmap(*arguments)

    @staticmethod
    def forward(layout: str, settings: Settings, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        operators = OPERATORS[layout]
        return operators.forward(*operators.arguments(Call(Tensors.from_flat(tensors), settings)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        layout, settings, *tensors = inputs
        ctx.layout, ctx.settings = layout, settings
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        differentiable = (*DIFFERENTIABLE, *range(len(FLAT_FIELDS), len(tensors)))
        needs = [needed[n] for n in differentiable]
        arguments = (ctx.layout, ctx.settings, needs, out, lse, dout, dlse, *tensors)
        # Dynamo takes no autograd.Function inside another's backward; compiled graphs refuse double backward themselves
        compiling = torch.compiler.is_compiling()
        found = run_backward(*arguments) if compiling else AttentionBackward.apply(*arguments)
        gradients: list[Tensor | None] = [None] * len(tensors)
        for position, gradient in zip(differentiable, found, strict=True):  # type: ignore[arg-type]
            gradients[position] = gradient if needed[position] else None
        return None, None, *gradients


class AttentionBackward(torch.autograd.Function):
    """The backward operator as a node of its own, so that differentiating it again is noticed."""

    @staticmethod
    def forward(layout: str, settings: Settings, needs: list[bool], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return run_backward(layout, settings, needs, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        raise AttentionError(
            "second derivatives of attention are not there yet (backward was called through a gradient that was "
            "made with create_graph=True, or torch.func transforms were nested).\n"
            "  accepted: first derivatives, torch.autograd.grad or torch.func.grad"
        )


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a normalised call, differentiable where a tensor requires it."""
    layout = "dense" if call.layout == "dense" else "varlen"
    tensors = call.tensors.flat()
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        if torch.compiler.is_compiling():
            tensors = distinct(tensors)
        return Attention.apply(layout, call.settings, *tensors)  # type: ignore[return-value]
    operators = OPERATORS[layout]
    return operators.forward(*operators.arguments(call))


def distinct(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Dynamo refuses an autograd.Function that gets one tensor twice, as in self-attention on `x, x, x`."""
    seen: list[Tensor] = []
    result: list[Tensor | None] = []
    for x in tensors:
        repeated = x is not None and any(x is y for y in seen)
        if x is not None:
            seen.append(x)
        result.append(x.view_as(x) if repeated and x is not None else x)
    return tuple(result)
