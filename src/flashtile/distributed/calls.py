"""A sharded call from its arguments to its results: checked, placed in the whole, and run by a scheme."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..block_mask import BlockMask
from ..call.call import Call, Settings, Tensors
from ..call.sharding import is_dtensor
from ..errors import ArgumentError, AttentionError
from . import ulysses
from .agreement import Description, agree
from .function import Sharded
from .group import EXAMPLE, Grid, grid_of
from .inputs import VARLEN_EXAMPLE, normalized, with_own_pairs, without_lists
from .layout import Layout, Piece, Placement, accepted, layout_of, rows_of_ranks
from .parts import Whole, settings_of_heads
from .passes import Saved
from .schemes import scheme_of, workload_of
from .simulate import Workload
from .visible import Document


class Placing(NamedTuple):
    """The arguments that say how a call is sharded, and the place of its sequences and heads in a larger call."""

    mesh: DeviceMesh | None
    layout: str | Layout
    scheme: str
    length: int | tuple[int, int] | None
    check: bool
    b0: int = 0
    h0: int = 0
    num_heads: int | None = None

    def within(self, call: Call) -> Call:
        """The call with its place in the larger one, if its results depend on that."""
        s = call.settings
        if self.num_heads is None or (s.dropout_p == 0 and s.score_mod is None and s.mask_mod is None):
            return call
        return call._replace(settings=call.settings._replace(b0=self.b0, h0=self.h0, num_heads=self.num_heads))


class Prepared(NamedTuple):
    """A rank's call with its place in the whole, and its scheme."""

    call: Call
    grid: Grid  # along which keys and heads travel
    rows: Layout
    keys: Layout
    workload: Workload
    scheme: str
    documents: tuple[Document, ...] | None  # documents of a packed call

    @property
    def outer(self) -> str:
        """The scheme by which keys travel."""
        return "gather" if self.scheme.startswith("gather") else "ring"


def prepared(
    tensors: dict[str, Any], keywords: dict[str, Any], placing: Placing, documents: tuple[Document, ...] | None
) -> Prepared:
    """Check a call, with the other ranks if that is asked for, and choose its scheme."""
    grid = grid_of(placing.mesh)
    try:
        accepted(placing.layout)
        tensors, lists = without_lists(tensors)
        call = placing.within(normalized(tensors, keywords))
    except AttentionError as error:
        if placing.check:
            agree(grid, str(error))  # raises an error on all ranks
        raise
    return placed(call, grid, lists, placing, documents, keywords["dropout_seed"])


def placed(
    call: Call,
    grid: Grid,
    lists: BlockMask | None,
    placing: Placing,
    documents: tuple[Document, ...] | None,
    seed: int | None,
) -> Prepared:
    """The place of a call in the whole, and its scheme."""
    assert placing.mesh is not None
    lengths = placing.length if isinstance(placing.length, tuple) else (placing.length, placing.length)
    numbers: tuple[list[int], ...] = ()
    if placing.check:  # it waits for the device
        described = Description.of(call, placing.layout, placing.scheme, placing.length, documents, seed)
        numbers = agree(grid, described)
        lengths = tuple(sum(n) if given is None else given for n, given in zip(numbers, lengths, strict=True))  # type: ignore[assignment]
    rows, keys = layouts_of(call, placing.layout, grid, lengths, numbers)
    if lists is not None and documents is None:
        lists.reject_lengths(EXAMPLE, rows.length, keys.length)
    elif lists is not None:
        lists.reject_packed(VARLEN_EXAMPLE)
    call = with_own_pairs(call, rows, keys.length, grid.rank, None if documents is None else len(documents))
    workload = workload_of(call, rows, keys, documents)
    scheme = scheme_of(placing.scheme, placing.mesh, workload)
    grid = grid.over_heads if scheme == "ulysses" else grid
    return Prepared(call, grid, rows, keys, workload, scheme, documents)


def layouts_of(
    call: Call, layout: str | Layout, grid: Grid, lengths: tuple[int | None, ...], numbers: tuple[list[int], ...]
) -> tuple[Layout, Layout]:
    """The layouts of rows and keys: this rank's, and all ranks' if that was asked."""
    layouts = []
    for argument, x, length, checked in zip(
        ("q", "k"), call.tensors[:2], lengths, numbers or (None, None), strict=True
    ):
        found = layout_of(argument, layout, x.shape[2], grid.size, length)
        expected = rows_of_ranks(found)
        if checked is not None and checked != expected:
            raise ArgumentError(argument, f"{checked} rows on the ranks", f"{expected}, as `shard` gives them", EXAMPLE)
        if x.shape[2] != expected[grid.rank]:
            expected_rows = f"{expected[grid.rank]} rows on rank {grid.rank}, as `shard` gives them of {found.length}"
            raise ArgumentError(argument, x, expected_rows, EXAMPLE)
        layouts.append(found)
    return layouts[0], layouts[1]


def run(ready: Prepared) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of this rank's rows: exchange rows for heads within the inner group, attend over the keys of the
    outer group, and exchange back.
    """
    grid = ready.grid
    tensors, whole, of_group = of_heads(ready)
    out, lse = Sharded.apply(ready.outer, whole, grid.outer, None, *tensors.flat())
    if of_group is not None:
        out = ulysses.to_rows(out, grid.inner, of_group)
        lse = ulysses.to_rows(lse[..., None], grid.inner, of_group)[..., 0]
    return out, lse


def gradients(ready: Prepared, inputs: list[Tensor], saved: Saved) -> tuple[Tensor | None, ...]:
    """The gradients of `inputs`, on which the call depends, from the results of its forward pass."""
    grid = ready.grid
    tensors, whole, of_group = of_heads(ready)
    if of_group is not None:
        rows = (saved.out, saved.lse[..., None], saved.dout, None if saved.dlse is None else saved.dlse[..., None])
        out, lse, dout, dlse = (None if x is None else ulysses.exchange(x, grid.inner, of_group) for x in rows)
        assert out is not None
        assert lse is not None
        saved = Saved(out, lse[..., 0], dout, None if dlse is None else dlse[..., 0])
    results = Sharded.apply(ready.outer, whole, grid.outer, (saved.out, saved.lse), *tensors.flat())
    given = [(x, dx) for x, dx in zip(results, (saved.dout, saved.dlse), strict=True) if dx is not None]
    return torch.autograd.grad([x for x, _ in given], inputs, [dx for _, dx in given], allow_unused=True)


def of_heads(ready: Prepared) -> tuple[Tensors, Whole, Placement | None]:
    """The call of this rank's heads, over the rows of its inner group, and where ranks exchange rows for heads, which
    rows those are.
    """
    outer, inner = ready.grid
    tensors, settings, of_group = ready.call.tensors._replace(out=None), ready.call.settings, None
    if inner.size > 1:
        ranks = range(outer.rank * inner.size, (outer.rank + 1) * inner.size)
        of_group, own_keys = Placement.within(ready.rows, ranks), Placement.within(ready.keys, ranks)
        num_heads = tensors.q.shape[1]
        settings = settings_of_heads(settings, inner.rank * num_heads // inner.size, num_heads)
        tensors = ulysses.to_heads(tensors, inner, of_group, own_keys)
    everything = Document(Piece(0, ready.rows.length), Piece(0, ready.keys.length))
    whole = Whole(
        settings,
        Placement.of(ready.rows, inner.size),
        Placement.of(ready.keys, inner.size),
        (everything,) if ready.documents is None else ready.documents,
        ready.documents is not None,
        depends_on_positions(tensors, settings),
    )
    return tensors, whole, of_group


def depends_on_positions(t: Tensors, s: Settings) -> bool:
    """Whether a score depends on the places of its row and key beyond the window."""
    functions = s.dropout_p > 0 or s.score_mod is not None or s.mask_mod is not None
    return functions or any(x is not None for x in (t.mask, t.bias, t.alibi_slopes))


def as_batch(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a packed call as a batch of 1."""
    tensors = dict(tensors)
    for name in ("q", "k", "v"):
        x = tensors[name]
        if not isinstance(x, Tensor) or x.dim() != 3 or is_dtensor(x):
            raise ArgumentError(name, x, "packed tokens [T, H, D], no DTensor", EXAMPLE)
        tensors[name] = x.transpose(0, 1)[None]
    return tensors


def lengths_of(documents: tuple[Document, ...]) -> tuple[int, int]:
    """Rows and keys of the whole sequence."""
    rows, keys = (max((d[n].stop for d in documents), default=0) for n in (0, 1))
    return rows, keys
