"""The operators that torch sees: schemas, shape formulas for tracing, vmap, and the way down to a backend.

Each layout has one operator for forward, for backward, for forward mode and for second derivatives, so that
`torch.compile`, `torch.export` and graph capture see single opaque calls. Inside them, below Dynamo, a call becomes a
problem, a plan, and a backend's kernels.
"""

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import private_torch
from ..call import counting
from ..call.call import (
    DIFFERENTIABLE,
    SETTINGS,
    TENSORS,
    Call,
    Gradients,
    Needs,
    Settings,
    Tangents,
    Tensors,
    differentiable_positions,
    lse_shape,
    new_rows,
    public_lse,
    row_stats_shape,
    split_row_stats,
)
from ..call.check_results import check_needs, check_results, check_tangents
from ..call.eager import in_forward_mode, is_plain_eager
from ..call.features import Field
from ..call.numbers import of_program
from ..call.problem import accumulation_dtype
from ..dynamo import untraced
from ..errors import AttentionError
from ..expression.registry import held
from . import fast_path, observed
from .passes import function_of, inside_operator, second
from .planner import count, plan_call
from .vmap import one_by_one, one_tangent_by_one

Results = tuple[Tensor | None, ...]  # out, lse, dout and dlse
LIBRARY = torch.library.Library("flashtile", "DEF")


class ForwardMode(threading.local):
    """Whether the caller of an operator cares for the tangents of its results, in forward mode."""

    handled = False


forward_mode = ForwardMode()


@contextmanager
def handled_tangents() -> Iterator[None]:
    """A context in which operators take tensors without regard to their tangents."""
    outer, forward_mode.handled = forward_mode.handled, True
    try:
        yield
    finally:
        forward_mode.handled = outer


def fields(layout: str) -> list[Field]:
    """The arguments of a layout's operators."""
    return [field for field in (*TENSORS, *SETTINGS) if field.in_layout(layout)]


class Operators:
    """The operators of one layout: forward, backward, forward with tangents, and the gradient of tangents."""

    def __init__(self, layout: str):
        self.layout = layout
        self.name = {"dense": "attention", "varlen": "attention_varlen"}[layout]
        self.fields = [field.name for field in fields(layout)]
        call = ", ".join(field.schema(layout) for field in fields(layout))
        gradients = ", ".join((*(f"Tensor d{name}" for name in DIFFERENTIABLE), "Tensor[] dmod"))
        LIBRARY.define(f"{self.name}_forward({call}) -> (Tensor out, Tensor lse)")
        LIBRARY.define(
            f"{self.name}_backward(bool[] needs, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, {call})"
            f" -> ({gradients})"
        )
        LIBRARY.define(
            f"{self.name}_tangents(bool[] moves, Tensor[] tangents, {call})"
            " -> (Tensor out, Tensor lse, Tensor dout, Tensor dlse)"
        )
        LIBRARY.define(
            f"{self.name}_second(bool[] moves, Tensor[] along, bool[] needs, Tensor? dout, Tensor? dlse, {call})"
            f" -> (Tensor tout, Tensor tlse, {gradients})"
        )
        for kind in ("forward", "backward", "tangents", "second"):
            LIBRARY.impl(f"{self.name}_{kind}", getattr(self, f"run_{kind}"), "CompositeExplicitAutograd")
            torch.library.register_fake(f"flashtile::{self.name}_{kind}", getattr(self, f"fake_{kind}"), lib=LIBRARY)
        torch.library.register_autograd(
            f"flashtile::{self.name}_forward", self.derivative, setup_context=self.setup_context, lib=LIBRARY
        )
        torch.library.register_autograd(f"flashtile::{self.name}_backward", refuse_second_derivative, lib=LIBRARY)
        for operator in ("forward", "backward", "second"):
            op = getattr(torch.ops.flashtile, f"{self.name}_{operator}").default
            torch.library.register_vmap(op, functools.partial(one_by_one, op), lib=LIBRARY)
        self.forward = getattr(torch.ops.flashtile, f"{self.name}_forward").default
        self.backward = getattr(torch.ops.flashtile, f"{self.name}_backward").default
        self.second = getattr(torch.ops.flashtile, f"{self.name}_second").default
        self.tangents = getattr(torch.ops.flashtile, f"{self.name}_tangents").default
        torch.library.register_vmap(self.tangents, functools.partial(one_tangent_by_one, self.tangents), lib=LIBRARY)

    def arguments(self, call: Call) -> list[Any]:
        """A call as the operators take it."""
        values = call.tensors._asdict() | call.settings._asdict()
        values["score_mod_tensors"] = list(call.tensors.score_mod_tensors) or None
        if values["score_mod_tensors"] and not torch.compiler.is_compiling():
            values["q"] = private_torch.batched_like(call.tensors.q, call.tensors.score_mod_tensors)
        return [values[name] for name in self.fields]

    def call(self, arguments: Sequence[Any]) -> Call:
        """The inverse of `arguments`."""
        values = dict(zip(self.fields, arguments, strict=True))
        tensors = {name: values.pop(name) for name in Tensors._fields if name in values}
        tensors["score_mod_tensors"] = tensors["score_mod_tensors"] or ()
        return Call(Tensors(**tensors), Settings(**values))

    def running_call(self, arguments: Sequence[Any]) -> Call:
        """The call of an operator that runs."""
        call = self.call(arguments)
        check_numbers(self.name, call)
        return call

    def attend(self, call: Call) -> tuple[Tensor, Tensor]:
        """`out` and `lse`, without a derivative. Plain eager calls bypass the dispatcher."""
        if not torch.compiler.is_compiling() and is_plain_eager(*call.tensors.flat()):
            return public_lse(call, run_forward(call))
        return public_lse(call, self.forward(*self.arguments(call)))

    def differentiate(
        self, needs: list[bool], out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, call: Call
    ) -> Sequence[Tensor | None]:
        """The gradients that `needs` asks for, and anything in place of the others. Plain eager calls bypass the
        dispatcher.
        """
        if not torch.compiler.is_compiling() and is_plain_eager(out, lse, dout, dlse, *call.tensors.flat()):
            call.entry = call.entry or fast_path.find_call(call)
            if call.entry is not None:
                return run_backward(needs, out, lse, dout, dlse, call)
        *gradients, modified = self.backward(needs, out, lse, dout, dlse, *self.arguments(call))
        return *gradients, *modified

    def with_tangents(self, call: Call, tangents: Tangents) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`out`, `lse` and their tangents, from the tangents of inputs: at least one."""
        present = [x for x in tangents.flat() if x is not None]
        return self.tangents(tangents.moves.flat(), present, *self.arguments(call))  # type: ignore[no-any-return]

    def gradients_of_tangents(
        self, needs: Needs, along: Tangents, dout: Tensor | None, dlse: Tensor | None, call: Call
    ) -> tuple[Tensor, ...]:
        """The tangents of `out` and `lse` along directions, then the gradients of `sum(dout * tangent of out) +
        sum(dlse * tangent of lse)` that `needs` asks for, and anything in place of the others.
        """
        present = [x for x in along.flat() if x is not None]
        *found, modified = self.second(along.moves.flat(), present, needs.flat(), dout, dlse, *self.arguments(call))
        return *found, *modified

    def run_forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        refuse_dropped_tangents()
        return run_forward(self.running_call(arguments))

    def run_tangents(
        self, moves: list[bool], tangents: list[Tensor], *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        refuse_dropped_tangents()
        call = self.running_call(arguments)
        return run_tangents(call, check_tangents(call, moves, tangents))

    def run_backward(
        self, needs: list[bool], out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, *arguments: Any
    ) -> tuple[Any, ...]:
        call = self.running_call(arguments)
        return in_schema(run_backward(needs, out, lse, dout, dlse, call), call)

    def run_second(
        self, moves: list[bool], along: list[Tensor], needs: list[bool], dout: Tensor | None, dlse: Tensor | None,
        *arguments: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        refuse_dropped_tangents()
        call = self.running_call(arguments)
        directions = check_tangents(call, moves, along)
        tout, tlse, gradients = run_second(check_needs(call, needs), directions, dout, dlse, call)
        return tout, tlse, *in_schema(gradients, call)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        call = self.call(inputs)
        ctx.settings = call.settings
        ctx.functions = held(call.settings.score_mod, call.settings.mask_mod)
        ctx.save_for_backward(*output, *call.tensors.flat())

    def derivative(self, ctx: Any, dout: Tensor, dstats: Tensor) -> tuple[Any, ...]:
        out, lse, *flat = ctx.saved_tensors
        call = Call(Tensors.from_flat(flat), ctx.settings)
        dlse = split_row_stats(call.tensors.q, dstats)[0]
        needed = self.call(ctx.needs_input_grad).tensors.flat()
        positions = differentiable_positions(len(flat))
        *named, modified = self.backward([needed[n] for n in positions], out, lse, dout, dlse, *self.arguments(call))
        gradients: list[Tensor | None] = [None] * len(flat)
        for n, gradient in zip(positions, (*named, *modified), strict=True):
            gradients[n] = gradient if needed[n] else None
        absent = Settings(*(None for _ in Settings._fields))  # type: ignore[arg-type]
        return tuple(self.arguments(Call(Tensors.from_flat(gradients), absent)))

    def fake_forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        call = self.call(arguments)
        q, v = call.tensors.q, call.tensors.v
        out = new_rows(q, q.shape[1], v.shape[-1], call.out_dtype)
        return out, q.new_empty(row_stats_shape(call), dtype=accumulation_dtype(q.dtype))

    def fake_tangents(
        self, moves: list[bool], tangents: list[Tensor], *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        call = self.call(arguments)
        check_tangents(call, moves, tangents)
        out, row_stats = self.fake_forward(*arguments)
        return out, row_stats, torch.empty_like(out), row_stats.new_empty(lse_shape(call.tensors.q))

    def fake_backward(
        self, needs: list[bool], out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, *arguments: Any
    ) -> tuple[Any, ...]:
        return self.fake_gradients(needs, self.call(arguments))

    def fake_second(
        self, moves: list[bool], along: list[Tensor], needs: list[bool], dout: Tensor | None, dlse: Tensor | None,
        *arguments: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        call = self.call(arguments)
        check_tangents(call, moves, along)
        out, row_stats = self.fake_forward(*arguments)
        return out, row_stats.new_empty(lse_shape(call.tensors.q)), *self.fake_gradients(needs, call)

    def fake_gradients(self, needs: list[bool], call: Call) -> tuple[Any, ...]:
        check_needs(call, needs)
        flat = call.tensors.flat()
        empty = []
        for n, needed in zip(differentiable_positions(len(flat)), needs, strict=True):
            x = flat[n]
            if x is None or not needed:
                empty.append(None)
            elif self.layout == "dense" and len(empty) < 3:
                empty.append(new_rows(x, x.shape[1], x.shape[-1], x.dtype))
            else:
                empty.append(x.new_empty(x.shape))
        return in_schema(empty, call)


@untraced
def run_forward(call: Call) -> tuple[Tensor, Tensor]:
    """The forward operators' own work: `out`, and `lse` with its residual where that is kept."""
    if counting.opened and (zeros := observed.forward(call)) is not None:
        return zeros
    call.entry = call.entry or fast_path.find_call(call)
    if call.entry is not None:
        results, chosen = fast_path.forward(call), call.entry.forward.plan
    else:
        call = call.with_own_indices()
        chosen = plan_call(call)
        with inside_operator(call):
            results = function_of(chosen, call.kind)(chosen, call)
    if counting.opened and chosen is not None:
        count(call, chosen, "forward")
    return results


@untraced
def run_backward(
    needs: Sequence[bool], out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, call: Call
) -> list[Tensor | None]:
    """The backward operators' own work: gradients in their inputs' dtypes, `None` for those not requested."""
    if counting.opened and (zeros := observed.backward(call, check_needs(call, needs))) is not None:
        return zeros
    call.entry = call.entry or fast_path.find_call(call)
    results = (out, lse, dout, dlse)
    gradients = None if call.entry is None else fast_path.backward(call, needs, results)
    if gradients is None:
        requested, call = check_needs(call, needs), call.with_own_indices()
        chosen = plan_call(call, needs=requested)
        check_results(call, out, lse, dout, dlse)
        with inside_operator(call):
            gradients = function_of(chosen, "backward")(chosen, call, requested, *results).flat()
        if counting.opened:
            count(call, chosen, "backward")
    inputs = call.tensors.flat()
    return [
        None if gradient is None or (x := inputs[n]) is None else in_dtype(gradient, x.dtype)
        for gradient, n in zip(gradients, differentiable_positions(len(inputs)), strict=True)
    ]


@untraced
def run_tangents(call: Call, tangents: Tangents) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The work of the operators of forward mode: the results of `run_forward`, and the tangents of `out` and `lse`."""
    if counting.opened and (zeros := observed.tangents(call, tangents)) is not None:
        return zeros
    call.entry = call.entry or fast_path.find_call(call)
    results = None if call.entry is None else fast_path.tangents(call, tangents)
    if results is None:
        call = call.with_own_indices()
        chosen = plan_call(call, moves=tangents.moves)
        with inside_operator(call):
            results = function_of(chosen, "tangents")(chosen, call, tangents)
        if counting.opened:
            count(call, chosen, "tangents")
    return results  # type: ignore[return-value]


@untraced
def run_second(
    needs: Needs, along: Tangents, dout: Tensor | None, dlse: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The work of the operators of second derivatives: tangents of results, and gradients in their inputs' dtypes."""
    call = call.with_own_indices()
    chosen = plan_call(call, needs=needs, moves=along.moves)
    with inside_operator(call):
        tout, tlse, gradients = second(chosen, call, along, needs, dout, dlse)
    if counting.opened:
        count(call, chosen, "second")
    inputs = call.tensors.flat()
    return (
        tout,
        tlse,
        [
            None if gradient is None or (x := inputs[n]) is None else in_dtype(gradient, x.dtype)
            for gradient, n in zip(gradients.flat(), differentiable_positions(len(inputs)), strict=True)
        ],
    )


def refuse_dropped_tangents() -> None:
    """Raise an error if an operator runs in forward mode as part of a traced program."""
    if in_forward_mode() and not forward_mode.handled:
        raise dropped_tangents()


def dropped_tangents() -> AttentionError:
    return AttentionError(
        "a traced or compiled program that contains attention was called in forward mode, which would drop the "
        "tangent.\n  accepted: forward mode around flashtile.attention(q, k, v) itself, untraced"
    )


def check_numbers(function: str, call: Call) -> None:
    """Check the settings of an operator that runs, and make them an eager call's: until now, numbers that a
    traced program computes were symbols.
    """
    call.settings = of_program(function, call.settings)
    if call.settings.dropout_p == 0 and call.tensors.dropout_seed is not None:
        call.tensors = call.tensors._replace(dropout_seed=None)


def replayed_backward(needs: Sequence[bool], results: Results, call: Call) -> Sequence[Tensor | None] | None:
    """Gradients of a recorded call with nothing but autograd around it, not all in their own dtypes; else `None`."""
    if call.entry is None or counting.opened or not is_plain_eager():
        return None
    return fast_path.replayed_backward(call, needs, results)


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)


def refuse_second_derivative(*_: Any) -> Any:
    raise AttentionError(
        "a traced or compiled program that contains attention can be differentiated once.\n"
        "  accepted: second derivatives of flashtile.attention(q, k, v) itself, untraced"
    )


def in_schema(gradients: Sequence[Tensor | None], call: Call) -> tuple[Any, ...]:
    """Gradients for a schema of fixed arity, with an empty tensor for each that was not requested."""
    present = [call.tensors.q.new_empty(0) if gradient is None else gradient for gradient in gradients]
    named = len(Gradients._fields) - 1
    return *present[:named], present[named:]


OPERATORS = {layout: Operators(layout) for layout in ("dense", "varlen")}


def operators_of(call: Call) -> Operators:
    return OPERATORS["dense" if call.layout == "dense" else "varlen"]
