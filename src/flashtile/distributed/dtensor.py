"""Calls with DTensors: each rank runs its part of the batch and of the heads, and its rows by a scheme."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..call.call import FEATURES, Tensors
from ..call.sharding import is_dtensor
from ..dispatch.autograd import attend
from ..errors import ArgumentError
from .calls import Placing, prepared, run
from .inputs import accepted_shapes, normalized, without_lists
from .layout import Layout, Piece, chunk, layout_of_whole

EXAMPLE = "flashtile.distributed.attention(q, k, v) with q, k and v DTensors of placements [Shard(0), Shard(2)]"
SIZES = "B", "H", "Sq"  # dimensions of q that may be sharded
ACCEPTED = "Replicate, Shard(0) of the batch, Shard(1) of the heads, Shard(2) of the sequence"


class Sharding(NamedTuple):
    """The placements of q: this rank's sequences and heads, and the dimensions of the mesh that share each size."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    sizes: dict[str, int]  # sizes of the whole, by name
    pieces: dict[str, Piece]  # pieces of this rank, by name

    def over(self, size: str) -> list[int]:
        """The dimensions of the mesh over which a size is sharded."""
        return [n for n, p in enumerate(self.placements) if isinstance(p, Shard) and SIZES[p.dim] == size]

    def ranks(self, size: str) -> int:
        """The number of parts of a size."""
        return torch.Size(self.mesh.size(n) for n in self.over(size)).numel()

    def gradient(self, placements: tuple[Placement, ...]) -> list[Placement]:
        """The placements of a tensor's gradient. Each part of q has its own term of a replicated tensor's gradient."""
        return [
            Partial() if isinstance(own, Replicate) and isinstance(of_q, Shard) else own
            for own, of_q in zip(placements, self.placements, strict=True)
        ]


def run_dtensors(tensors: dict[str, Any], keywords: dict[str, Any], placing: Placing) -> tuple[Tensor, Tensor]:
    """`out` and `lse` as DTensors with the placements of q."""
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    parts = sharding_of(q, k, v)
    for name, function in (("score_mod", keywords["score_mod"]), ("mask", tensors["mask"])):
        if any(map(is_dtensor, getattr(function, "tensors", ()))):
            raise ArgumentError(name, "a function that reads a DTensor", "one of tensors that all ranks have", EXAMPLE)
    head_dim = v.shape[3]
    local = {
        name: None if x is None else local_feature(name, x, parts) for name, x in tensors.items() if name not in "qkv"
    }
    local |= {"q": q.to_local(grad_placements=parts.placements)}
    local |= {name: local_keys(x, parts) for name, x in (("k", k), ("v", v))}
    placing = placing._replace(
        b0=parts.pieces["B"].start, h0=parts.pieces["H"].start, num_heads=parts.sizes["H"], **rows_of(parts, placing, k)
    )
    if placing.mesh is None:
        local, lists = without_lists(local)
        if lists is not None:
            lists.reject_lengths(EXAMPLE, parts.sizes["Sq"], parts.sizes["Sk"])
        out, lse = attend(placing.within(normalized(local, keywords)))
    else:
        out, lse = run(prepared(local, keywords, placing, None))
    shape = torch.Size((*q.shape[:3], head_dim))
    return wrapped(out, parts, shape), wrapped(lse, parts, shape[:3])


def wrapped(x: Tensor, parts: Sharding, shape: torch.Size) -> DTensor:
    """A result of this rank as its part of a DTensor of `shape`, placed as q."""
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        x.contiguous(), parts.mesh, parts.placements, run_check=False, shape=shape, stride=strides
    )


def sharding_of(q: Any, k: Any, v: Any) -> Sharding:
    """The placements of a call, if they are such that each rank can run its part."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor) or x.dim() != 4:
            raise ArgumentError(name, x, "a DTensor [B, H, S, D], as the others are", EXAMPLE)
        if x.device_mesh != q.device_mesh or x.device_mesh.get_coordinate() is None:
            raise ArgumentError(name, x.device_mesh, "a DTensor on the mesh of q, which this process is in", EXAMPLE)
        for placement in x.placements:
            # By type, since strided shards, whose rows have another order, are shards by inheritance.
            if type(placement) not in (Replicate, Shard) or getattr(placement, "dim", 0) > 2:
                raise ArgumentError(name, f"placed as {x.placements}", f"placements of {ACCEPTED}", EXAMPLE)
    accepted_shapes(Tensors(q, k, v))  # shapes of the whole: parts may fit where it does not, or on some ranks alone
    mesh, placements = q.device_mesh, q.placements
    sizes = {"B": q.shape[0], "H": q.shape[1], "Sq": q.shape[2], "Sk": k.shape[2]}
    parts = Sharding(
        mesh, placements, sizes, {size: piece_of(mesh, placements, n, q.shape[n]) for n, size in enumerate(SIZES)}
    )
    replicated = tuple(Replicate() if p == Shard(1) else p for p in placements)
    if k.placements not in (placements, replicated):
        accepted = f"{placements} as q, or for heads that all ranks have {replicated}"
        raise ArgumentError("k", f"placed as {k.placements}", accepted, EXAMPLE)
    if v.placements != k.placements:
        raise ArgumentError("v", f"placed as {v.placements}", f"{k.placements} as k", EXAMPLE)
    ranks = parts.ranks("H")
    for name, x in (("q", q), ("k", k)):
        if ranks > 1 and x.shape[1] % ranks != 0 and (name == "q" or k.placements == placements):
            accepted = f"a number of heads that their {ranks} parts divide; k and v may be replicated instead"
            raise ArgumentError(name, f"{x.shape[1]} heads", accepted, EXAMPLE)
    return parts


def piece_of(mesh: DeviceMesh, placements: tuple[Placement, ...], dim: int, length: int) -> Piece:
    """This rank's piece of a dimension, which the mesh's dimensions cut one after another."""
    piece = Piece(0, length)
    for n, placement in enumerate(placements):
        if placement == Shard(dim):
            piece = chunk(piece, mesh.get_local_rank(n), mesh.size(n))
    return piece


def local_keys(x: DTensor, parts: Sharding) -> Tensor:
    """This rank's k or v for its query heads. Where all ranks have all key heads, those that the query heads read."""
    local = x.to_local(grad_placements=parts.gradient(x.placements))
    if x.placements == parts.placements:
        return local
    heads, group = parts.pieces["H"], parts.sizes["H"] // max(x.shape[1], 1)
    if x.shape[1] == 0 or heads.start % group == heads.length % group == 0:
        return local[:, heads.start // group : heads.stop // group] if x.shape[1] else local
    if heads.start // group == (heads.stop - 1) // group:
        return local[:, heads.start // group, None]
    return local[:, torch.arange(heads.start, heads.stop, device=local.device) // group]


def local_feature(name: str, x: Any, parts: Sharding) -> Any:
    """This rank's sequences and heads of a mask, bias, slopes or sinks. Rows are selected by the scheme's layout."""
    if not isinstance(x, Tensor):
        return x  # a function of positions in the whole
    shapes = [shape for shape in FEATURES[name].shapes if len(shape) == x.dim()]
    if not shapes:
        return x  # the error is that of the call
    letters = [size.removesuffix("|1") for size in shapes[0]]
    complete = dict.fromkeys(letters, True)  # sizes of which each rank has everything
    if isinstance(x, DTensor):
        if x.device_mesh != parts.mesh:
            raise ArgumentError(name, x.device_mesh, "the mesh of q", EXAMPLE)
        for size in letters:
            dim = letters.index(size)
            over = [n for n, p in enumerate(x.placements) if p == Shard(dim)]
            complete[size] = not over
            if over and (size not in SIZES or over != parts.over(size) or x.shape[dim] != parts.sizes[size]):
                raise ArgumentError(name, f"placed as {x.placements}", "replicated, or sharded as q", EXAMPLE)
        if any(type(p) not in (Replicate, Shard) for p in x.placements):
            raise ArgumentError(name, f"placed as {x.placements}", "replicated, or sharded as q", EXAMPLE)
        x = x.to_local(grad_placements=parts.gradient(x.placements))
    for dim, size in enumerate(letters):
        if size not in ("B", "H") or not complete[size] or (x.shape[dim] == 1 and FEATURES[name].broadcasts):
            continue
        if x.shape[dim] != parts.sizes[size]:
            accepted = f"{parts.sizes[size]} elements in dimension {dim}: those of all ranks, or a DTensor sharded as q"
            raise ArgumentError(name, x, accepted, EXAMPLE)
        x = x.narrow(dim, parts.pieces[size].start, parts.pieces[size].length)
    return x


def rows_of(parts: Sharding, placing: Placing, k: DTensor) -> dict[str, Any]:
    """The mesh over which rows are sharded, their layout and their number."""
    over, ranks = parts.over("Sq"), parts.ranks("Sq")
    if not over:
        return {}
    if placing.mesh is not None and placing.mesh != parts.mesh:
        raise ArgumentError("mesh", placing.mesh, "None for DTensors whose sequence is sharded", EXAMPLE)
    lengths = parts.sizes["Sq"], parts.sizes["Sk"]
    if placing.length not in (None, lengths, *lengths[: lengths[0] == lengths[1]]):
        raise ArgumentError("length", placing.length, f"None for DTensors, here {lengths}", EXAMPLE)
    given = "chunks" if placing.layout == "contiguous" else placing.layout
    for name, length in zip(("q", "k"), lengths, strict=True):
        layout, chunks = layout_of_whole(given, length, ranks), Layout("chunks", length, ranks)
        same = all(layout.rows(rank) == chunks.rows(rank) for rank in range(ranks))
        if not same or (len(over) > 1 and length % ranks != 0):
            accepted = f"a multiple of {ranks * layout.pieces_per_rank} rows for {ranks} ranks in layout {layout.kind}"
            raise ArgumentError(name, f"{length} rows", accepted, EXAMPLE)
    return {"mesh": part_of_mesh(parts.mesh, tuple(over)), "layout": given, "length": lengths}


def part_of_mesh(mesh: DeviceMesh, dims: tuple[int, ...]) -> DeviceMesh:
    """The mesh of some dimensions of a mesh, in which this process is."""
    if len(dims) == mesh.ndim:
        return mesh
    if mesh.mesh_dim_names is not None:
        names = tuple(mesh.mesh_dim_names[n] for n in dims)
        return mesh[names]
    if len(dims) == 1:
        return DeviceMesh.from_group(mesh.get_group(dims[0]), mesh.device_type)
    raise ArgumentError("mesh", mesh, "names of its dimensions, to shard a sequence over two of them", EXAMPLE)
