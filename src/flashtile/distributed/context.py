"""Contexts in which the attention calls of a program run over a mesh, without a change to the program."""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from .. import private_torch
from ..call import sharding
from ..call.advice import PUBLIC, refuse
from ..errors import ArgumentError, AttentionError
from . import compiled, sharded
from .group import grid_of
from .layout import Layout, accepted
from .sdpa import sharded_sdpa

EXAMPLE = 'with flashtile.distributed.context_parallel(mesh, layout="zigzag"): model(shard(tokens, mesh, 1))'
FUNCTIONS = {"attention": sharded.attention, "attention_varlen": sharded.attention_varlen}
BOUNDS = "max_seqlen_q", "max_seqlen_k"  # which change no result
POSITIONAL = {
    name: tuple(p.name for p in PUBLIC[name].parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)
    for name in FUNCTIONS
}
OTHERS = frozenset().union(*(PUBLIC[name].parameters for name in FUNCTIONS))
KEYWORDS = {
    name: frozenset(PUBLIC[name].parameters).intersection(signature(function).parameters).difference(POSITIONAL[name])
    for name, function in FUNCTIONS.items()
}


class Context(NamedTuple):
    """The placing of all calls of a context."""

    mesh: DeviceMesh
    layout: str | Layout
    scheme: str
    length: int | tuple[int, int] | None
    check: bool


@contextmanager
def context_parallel(
    mesh: DeviceMesh | None,
    *,
    layout: str | Layout = "contiguous",
    scheme: str = "auto",
    length: int | tuple[int, int] | None = None,
    check: bool = False,
) -> Iterator[None]:
    """Shard a program's calls of `flashtile.attention` and `attention_varlen` over a mesh.

    In the context, q, k and v of these functions are this rank's rows, and the other arguments have the meaning that
    they have in `flashtile.distributed.attention` and `attention_varlen`. So do the calls of all that uses them:
    `flashtile.nn`, transformers and diffusers, `flash_attn`'s names, and `scaled_dot_product_attention` if
    `flashtile.compat.torch.activate` was called before. Shard everything that has the sequence, as tokens, labels and
    positions, with `shard` and the layout of the context. The context holds for the thread that opens it, and for the
    backward passes that it starts in the context. Backward passes that recompute attention, as activation
    checkpointing does, have to start there.

    Example:
        >>> with flashtile.distributed.context_parallel(mesh, layout="zigzag"):  # doctest: +SKIP
        ...     loss = model(tokens, positions, labels)
        ...     loss.backward()

    Args:
        mesh: a `DeviceMesh` with one or two dimensions. `None` takes calls out of an outer context.
        layout: as in `shard`, by which all these tensors were sharded.
        scheme: as in `flashtile.distributed.attention`.
        length: rows of the whole sequence, as in `flashtile.distributed.attention`.
        check: compare shapes and arguments of all ranks before each call. This waits for the device.

    Raises:
        ArgumentError: `mesh` or `layout` is not one of those. In the context also calls with arguments that sharded
            calls do not have: `num_splits`, `out`, `seqused_q`, `seqused_k`, `page_table`.
        AttentionError: in the context, `attention_with_kvcache`; and PyTorch's own attention functions, where their
            derivative would not be sharded.
    """
    if mesh is None:
        with sharding.inside(None):
            yield
        return
    grid_of(mesh)
    accepted(layout)
    compiled.mesh_name(mesh)  # which a trace looks up
    with sharding.inside(Context(mesh, layout, scheme, length, check)), sharded_sdpa():
        yield


def run_public(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context | None) -> Any:
    """The results of a public function's call in a context, or with DTensors."""
    if name not in FUNCTIONS or (context is None and name != "attention"):
        raise AttentionError(
            f"flashtile.{name} has no sharded calls of {'DTensors' if context is None else 'a context'}.\n"
            f"  accepted: plain tensors{'' if context is None else ', in `with context_parallel(None)`'}"
        )
    if private_torch.below_autograd() and not torch.is_inference_mode_enabled():
        raise AttentionError(
            "an operator calls attention in context_parallel: its derivative would not be sharded.\n"
            "  accepted: flashtile.compat.torch.activate() before the context, and its scaled_dot_product_attention, "
            "varlen_attn and flex_attention"
        )
    positional = POSITIONAL[name]
    if len(args) > len(positional):
        refuse(name, args[len(positional) :], {})
    given = dict(zip(positional, args, strict=False)) | kwargs
    function = FUNCTIONS[name]
    for argument, value in list(given.items()):
        if argument not in PUBLIC[name].parameters:
            refuse(name, (), {argument: value})
        if argument not in positional and argument not in KEYWORDS[name]:
            del given[argument]
            if value is not None and argument not in BOUNDS:
                raise ArgumentError(argument, value, "None in sharded calls, which do not have it", EXAMPLE)
    placing = {} if context is None else context._asdict()
    if name == "attention_varlen":
        del placing["length"]  # its offsets have it
    return function(**given, **placing)


def run_in_graph(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `run_public` in a graph; `NotImplemented` for calls that it refuses, and for DTensors."""
    if name not in FUNCTIONS or len(args) > len(POSITIONAL[name]):
        return NotImplemented
    given = {}
    for argument, value in (*zip(POSITIONAL[name], args, strict=False), *kwargs.items()):
        if sharding.is_dtensor(value) or argument in given:
            return NotImplemented
        if argument in POSITIONAL[name] or argument in KEYWORDS[name]:
            given[argument] = value
        elif argument not in BOUNDS and (value is not None or argument not in OTHERS):
            return NotImplemented
    return FUNCTIONS[name](**given, mesh=compiled.IN_CONTEXT)


sharding.traced = run_in_graph
