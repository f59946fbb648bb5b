"""Sharded calls under `torch.compile`: one opaque operator for each pass, in which all exchanges take place.

The operators take the arguments of the dense ones, and before them a key of the mesh and of what else is a constant of
the graph, and lengths: the whole sequence's, or the offsets of packed sequences. Only inputs and results are
saved for backward, which exchanges rows for heads again where a scheme has done that.
"""

import functools
import hashlib
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import private_torch
from ..api.normalize import normalize
from ..block_mask import BlockMask
from ..call import sharding
from ..call.call import DIFFERENTIABLE, Call, Settings, Tensors, differentiable_positions
from ..dispatch.operators import OPERATORS, fields, in_schema, refuse_second_derivative
from ..dispatch.passes import inside_operator
from ..dynamo import untraced
from ..errors import ArgumentError, AttentionError
from . import calls
from .calls import Placing, Prepared
from .group import EXAMPLE, grid_of
from .inputs import accepted_here, accepted_shapes, documents_of, without_lists
from .layout import Layout, Piece, accepted
from .passes import Saved

DENSE = OPERATORS["dense"]
LENGTHS = "SymInt[] length, SymInt[] offsets_q, SymInt[] offsets_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
LIBRARY = torch.library.Library("flashtile", "FRAGMENT")


IN_CONTEXT: Any = "context"  # in place of a mesh: the placing is that of the thread's context


class Constants(NamedTuple):
    """Constants of a graph: how its call is sharded, whether it is packed, and the sizes of its lists."""

    placing: Placing
    context: Any  # that the call was traced in
    is_packed: bool
    block_size: tuple[int, int] | None
    seqlens: tuple[int, int] | None


KNOWN: dict[str, Constants] = {}


class Lengths(NamedTuple):
    """The lengths of the whole as operators take them. Offsets of packed sequences are lists, or tensors on the CPU."""

    length: Sequence[int] = ()  # lengths of rows and keys, one of both, or none
    offsets_q: Sequence[int] = ()
    offsets_k: Sequence[int] = ()
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @classmethod
    def of(cls, length: int | tuple[int, int] | None, cu_seqlens_q: Any, cu_seqlens_k: Any) -> "Lengths":
        of_whole = [] if length is None else [*length] if isinstance(length, tuple) else [length]
        lists, tensors = [], []
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if not isinstance(x, Tensor | list | tuple | None):
                raise ArgumentError(name, x, "offsets [B + 1] in a list or a tensor on the CPU", EXAMPLE)
            tensors.append(x if isinstance(x, Tensor) else None)
            lists.append([*x] if isinstance(x, list | tuple) else [])
        return cls(of_whole, *lists, *tensors)

    def documents(self) -> Any:
        of_rows = self.cu_seqlens_q if self.cu_seqlens_q is not None else [*self.offsets_q]
        of_keys = self.cu_seqlens_k if self.cu_seqlens_k is not None else [*self.offsets_k] or None
        return documents_of(of_rows, of_keys)

    def of_whole(self) -> int | tuple[int, int] | None:
        return None if not self.length else self.length[0] if len(self.length) == 1 else tuple(self.length)  # type: ignore[return-value]


def run(
    tensors: dict[str, Any], keywords: dict[str, Any], placing: Placing, cu_seqlens: tuple[Any, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` in a graph. Dynamo traces this: it looks at Python values and types only."""
    for name in ("q", "k", "v"):
        if sharding.is_dtensor(tensors[name]):
            raise ArgumentError(name, "a DTensor", "under torch.compile a tensor of this rank", EXAMPLE)
    if not isinstance(placing.layout, Layout):
        accepted(placing.layout)
    accepted_here(keywords)
    tensors, lists = without_lists(tensors)
    call = normalize("attention", tensors, num_splits=None, whole=False, **keywords)
    of_lists = None, None
    if lists is not None:
        of_lists = fixed(lists.block_size), None if lists.seqlens is None else fixed(lists.seqlens)
    layout = placing.layout
    if isinstance(layout, Layout):
        pieces = tuple([tuple([fixed(piece) for piece in of_rank]) for of_rank in layout.by_rank])
        layout = layout.kind, operator.index(layout.length), operator.index(layout.ranks), pieces
    key = remembered(placing.mesh, layout, placing.scheme, placing.check, cu_seqlens is not None, *of_lists)
    lengths = Lengths.of(placing.length, *(cu_seqlens or (None, None)))
    return torch.ops.flashtile.sharded_forward(key, *lengths, *DENSE.arguments(call))  # type: ignore[no-any-return]


def fixed(numbers: Sequence[int]) -> tuple[int, ...]:
    """Integers that are constants of a graph: others may become symbols when they change."""
    return tuple([operator.index(n) for n in numbers])


@functools.lru_cache(maxsize=64)
def mesh_name(mesh: DeviceMesh) -> str:
    groups = [mesh.get_group(n).group_name for n in range(mesh.ndim)]
    return f"{mesh.device_type} {mesh.mesh.tolist()} {mesh.mesh_dim_names} {groups}"


@private_torch.constant_result
def remembered(mesh: Any, layout: Any, scheme: str, check: bool, is_packed: bool, block_size: Any, seqlens: Any) -> str:
    """The key of constants, the same in each process that has the same ones: graphs are cached on disk."""
    mesh, length, context = private_torch.real_object(mesh), None, None
    if mesh == IN_CONTEXT:
        mesh, layout, scheme, length, check = context = sharding.current()
    elif not isinstance(layout, str):
        kind, whole, ranks, pieces = layout
        layout = Layout(kind, whole, ranks, tuple(tuple(Piece(*piece) for piece in of_rank) for of_rank in pieces))
    name = mesh_name(mesh) if isinstance(mesh, DeviceMesh) else repr(mesh)
    of_context = context is not None, length
    constants = repr((name, layout, scheme, check, of_context, is_packed, block_size, seqlens))
    key = hashlib.sha256(constants.encode()).hexdigest()[:16]
    KNOWN[key] = Constants(Placing(mesh, layout, scheme, length, check), context, is_packed, block_size, seqlens)
    return key


@untraced
def prepared(key: str, lengths: Lengths, call: Call, check: bool) -> Prepared:
    """The call of an operator."""
    constants = KNOWN[key]
    placing, lists, documents = constants.placing, None, None
    if lengths.length:
        placing = placing._replace(length=lengths.of_whole())
    accepted_shapes(call.tensors)
    if constants.is_packed:
        documents = lengths.documents()
        placing = placing._replace(length=calls.lengths_of(documents))
    if constants.block_size is not None:
        assert call.settings.mask_mod is not None
        of_mask = call.tensors.score_mod_tensors[call.num_score_tensors :]
        lists = BlockMask.of_function(call.settings.mask_mod, tuple(of_mask), constants.block_size, constants.seqlens)
    seed = None
    if placing.check and check and call.tensors.dropout_seed is not None:
        seed = int(call.tensors.dropout_seed)
    placing = placing._replace(check=placing.check and check)
    return calls.placed(call, grid_of(placing.mesh), lists, placing, documents, seed)


@untraced
def run_forward(key: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    lengths, call = Lengths(*arguments[:5]), DENSE.running_call(arguments[5:])
    if (context := KNOWN[key].context) is not None and context != sharding.current():
        raise AttentionError(
            "a call that was compiled in context_parallel runs outside of it.\n"
            "  accepted: the compiled function, and backward passes that recompute attention, in that context"
        )
    with inside_operator(call):
        out, lse = calls.run(prepared(key, lengths, call, True))
        return tuple(as_planned(x, y) for x, y in zip((out, lse), fake_forward(key, *arguments), strict=True))  # type: ignore[return-value]


@untraced
def run_backward(
    needs: Sequence[bool], out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, key: str, *arguments: Any
) -> tuple[Any, ...]:
    lengths, call = Lengths(*arguments[:5]), DENSE.running_call(arguments[5:])
    flat = call.tensors.flat()
    positions = differentiable_positions(len(flat))
    with inside_operator(call), torch.enable_grad():
        leaves = list(flat)
        for n, needed in zip(positions, needs, strict=True):
            x = flat[n]
            leaves[n] = x.detach().requires_grad_(needed) if x is not None else None
        inputs = [x for n in positions if (x := leaves[n]) is not None and x.requires_grad]
        differentiable = Call(Tensors.from_flat(leaves), call.settings)
        ready = prepared(key, lengths, differentiable, False)
        found = iter(calls.gradients(ready, inputs, Saved(out, lse, dout, dlse)))
    planned = fake_backward(needs, out, lse, dout, dlse, key, *arguments)
    gradients: list[Tensor | None] = []
    for n, empty in zip(positions, (*planned[:-1], *planned[-1]), strict=True):
        x = leaves[n]
        gradient = next(found) if x is not None and x.requires_grad else None
        if gradient is None and x is not None and x.requires_grad:  # no part of this rank reads it
            gradient = torch.zeros_like(x)
        gradients.append(None if gradient is None else as_planned(gradient, empty))
    return in_schema(gradients, call)


def as_planned(x: Tensor, planned: Tensor) -> Tensor:
    """A result with the strides that a compiler counts on, in memory of its own."""
    if x.stride() == planned.stride() and x.untyped_storage().nbytes() == x.nbytes:
        return x
    return planned.copy_(x)


def fake_forward(key: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = DENSE.fake_forward(*arguments[5:])
    return out, lse.new_empty(out.shape[:-1])


def fake_backward(
    needs: Sequence[bool], out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, key: str, *arguments: Any
) -> tuple[Any, ...]:
    return DENSE.fake_backward(list(needs), out, lse, dout, dlse, *arguments[5:])


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    key, *lengths = inputs[:6]
    call = DENSE.call(inputs[6:])
    ctx.set_materialize_grads(False)
    ctx.key, ctx.lists, ctx.settings = key, lengths[:3], call.settings
    ctx.save_for_backward(*output, *lengths[3:], *call.tensors.flat())


def derivative(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    out, lse, cu_seqlens_q, cu_seqlens_k, *flat = ctx.saved_tensors
    call = Call(Tensors.from_flat(flat), ctx.settings)
    needed = DENSE.call(ctx.needs_input_grad[6:]).tensors.flat()
    positions = differentiable_positions(len(flat))
    *named, modified = torch.ops.flashtile.sharded_backward(
        [needed[n] for n in positions], out, lse, dout, dlse, ctx.key, *ctx.lists, cu_seqlens_q, cu_seqlens_k,
        *DENSE.arguments(call),
    )  # fmt: skip
    gradients: list[Tensor | None] = [None] * len(flat)
    for n, gradient in zip(positions, (*named, *modified), strict=True):
        gradients[n] = gradient if needed[n] else None
    absent = Settings(*(None for _ in Settings._fields))  # type: ignore[arg-type]
    of_lists = (None if numbers else [] for numbers in ctx.lists)  # PyTorch takes an empty list for one of tensors
    return (None, *of_lists, None, None, *DENSE.arguments(Call(Tensors.from_flat(gradients), absent)))


def define() -> None:
    """The operators, with their shapes and derivative."""
    arguments = ", ".join(["str key", LENGTHS, *(field.schema("dense") for field in fields("dense"))])
    gradients = ", ".join((*(f"Tensor d{name}" for name in DIFFERENTIABLE), "Tensor[] dmod"))
    LIBRARY.define(f"sharded_forward({arguments}) -> (Tensor out, Tensor lse)")
    LIBRARY.define(
        f"sharded_backward(bool[] needs, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, {arguments}) -> "
        f"({gradients})"
    )
    for name, function, fake in (
        ("sharded_forward", run_forward, fake_forward),
        ("sharded_backward", run_backward, fake_backward),
    ):
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"flashtile::{name}", fake, lib=LIBRARY)
    torch.library.register_autograd("flashtile::sharded_forward", derivative, setup_context=setup_context, lib=LIBRARY)
    torch.library.register_autograd("flashtile::sharded_backward", refuse_second_derivative, lib=LIBRARY)


define()
