"""The public functions: attention over a sequence whose rows and keys are sharded over a mesh."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..api.signatures import Causal, MaskArgument, ScoreModArgument, WindowArgument
from ..call.call import Call, Settings, Tensors
from ..call.sharding import is_dtensor
from ..errors import ArgumentError, AttentionError
from . import ulysses
from .agreement import Description, agree
from .function import Sharded
from .group import EXAMPLE, Grid, grid_of
from .inputs import VARLEN_EXAMPLE, documents_of, normalized, with_own_pairs, without_lists
from .layout import Layout, Piece, Placement, accepted, layout_of
from .parts import Whole, settings_of_heads
from .schemes import scheme_of, workload_of
from .simulate import Workload
from .visible import Document

TENSORS = "q", "k", "v", "mask", "bias", "alibi_slopes", "sinks"
KEYWORDS: dict[str, Any] = {
    "causal": False, "window": None, "attention_chunk": None, "scale": None, "softcap": None, "score_mod": None,
    "dropout_p": 0.0, "dropout_seed": None, "deterministic": None, "backend": "auto",
}  # fmt: skip


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


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | None = None,
    layout: str | Layout = "contiguous",
    scheme: str = "auto",
    length: int | tuple[int, int] | None = None,
    check: bool = False,
    causal: Causal = False,
    window: WindowArgument = None,
    attention_chunk: int | None = None,
    mask: MaskArgument = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreModArgument = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of this rank's rows over the keys of all ranks of a mesh.

    Arguments mean what they mean in `flashtile.attention` for the whole sequence: positions of causal, window, masks,
    ALiBi, score_mod and dropout are those in it, and a seed gives the dropout mask of one device. First derivatives
    exist, also through `lse`. Gradients of tensors that all ranks have (bias, slopes, sinks, tensors of score_mod) are
    those of this rank's rows or heads, to be summed over the mesh as those of a model's weights are. Shard the sequence
    with `shard`, and all ranks must take part in forward and in backward (Liu et al., "Ring Attention", 2023; Jacobs et
    al., "DeepSpeed Ulysses", 2023).

    Of `DTensor`s, the sequence, the batch and the heads may be sharded, each over other dimensions of the mesh; k and v
    have the placements of q, short of heads, which may be replicated. Other tensors are whole, or DTensors with the
    placements of q or replicated ones.

    Args:
        q: this rank's rows of the queries `[B, Hq, Sq, D]`.
        k: this rank's rows of the keys `[B, Hkv, Sk, D]`.
        v: this rank's rows of the values `[B, Hkv, Sk, Dv]`.
        mesh: a `DeviceMesh` with one dimension; or with two, of which heads are exchanged along the second. `None` for
            DTensors, which have one.
        layout: that of `shard`, for queries and keys; "zigzag" balances causal attention, a `Layout` of `balanced` any
            mask of as many queries as keys. DTensors are cut as "chunks", unless their rows are in another order.
        scheme: "ring" (keys travel from rank to rank), "gather" (each rank gathers all keys, some heads at a time),
            "ulysses" (ranks exchange rows for heads; for as many ranks as divide Hq); for a mesh with two dimensions
            "ring+ulysses" or "gather+ulysses". "auto" takes what `simulate` takes to be the fastest.
        length: rows of the whole sequence, or those of queries and of keys. `None`: all ranks have as many, or the
            tensors are DTensors.
        check: compare shapes and arguments of all ranks first, and raise on all of them where they differ. This waits
            for the device. Without it, ranks that differ end in the process group's timeout, or in wrong results.
        mask: bool, as `bias`; or a function of positions, `(b, h, q_idx, k_idx) -> bool`.
        bias: `[B, Hq, Sq, Sk]`, each dimension may be 1, with all keys, and this rank's rows or all.
        alibi_slopes: `[Hq]` or `[B, Hq]`, the same on all ranks.
        sinks: `[Hq]`, the same on all ranks.
        dropout_seed: an int, the same on all ranks; required where `dropout_p` is above 0.

    The other arguments are those of `flashtile.attention`.

    Returns:
        `out [B, Hq, Sq, Dv]` of this rank's rows in q's dtype; with `return_lse` also `lse [B, Hq, Sq]`. Of DTensors,
        both have the placements of q.

    Raises:
        ArgumentError: an argument is not what it should be, or the rank's rows are not those of the layout.
        AttentionError: with `check`, on all ranks, where one raises or differs from the first rank.
        BackendError: no backend takes a part of the call, or the named one does not.
        ExchangeError: in forward or backward, another rank has ended, raised, or not come within the timeout of the
            process group. NCCL ends the process instead.
    """
    tensors, keywords = arguments_of(locals())
    placing = Placing(mesh, layout, scheme, length, check)
    if any(map(is_dtensor, tensors.values())):
        from .dtensor import run_dtensors

        out, lse = run_dtensors(tensors, keywords, placing)
    else:
        out, lse = run(tensors, keywords, placing)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    mesh: DeviceMesh,
    layout: str | Layout = "contiguous",
    scheme: str = "auto",
    check: bool = False,
    causal: Causal = False,
    window: WindowArgument = None,
    attention_chunk: int | None = None,
    mask: MaskArgument = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreModArgument = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of packed sequences, whose tokens are sharded over a mesh as one sequence.

    Arguments mean what they mean in `flashtile.attention_varlen` for the whole, and in `attention` for the mesh. A
    sequence may begin on one rank and end on another. Each pair of a sequence's rows and keys on a rank is one call of
    the operators, so that it suits sequences of thousands of tokens.

    Args:
        q: this rank's tokens `[Tq, Hq, D]`.
        k: this rank's tokens `[Tk, Hkv, D]`.
        v: this rank's tokens `[Tk, Hkv, Dv]`.
        cu_seqlens_q: offsets `[B + 1]` of all sequences, in a list or a tensor on the CPU. The last one is the number
            of tokens of all ranks.
        cu_seqlens_k: those of keys; by default those of queries.
        alibi_slopes: `[Hq]` or `[B, Hq]`, the same on all ranks.

    The other arguments are those of `attention`.

    Returns:
        `out [Tq, Hq, Dv]` of this rank's tokens in q's dtype; with `return_lse` also `lse [Hq, Tq]`.

    Raises:
        ArgumentError: as `attention`; also for offsets that decrease or are not on the host.
        AttentionError: as `attention`.
        BackendError: as `attention`.
    """
    tensors, keywords = arguments_of(locals())
    documents = documents_of(cu_seqlens_q, cu_seqlens_k)
    tensors, length = packed(tensors, documents)
    out, lse = run(tensors, keywords, Placing(mesh, layout, scheme, length, check), documents)
    out = out[0].transpose(0, 1)
    return (out, lse[0]) if return_lse else out


def packed(tensors: dict[str, Any], documents: tuple[Document, ...]) -> tuple[dict[str, Any], tuple[int, int]]:
    """The tensors of a packed call as those of a batch of 1, and the numbers of all ranks' rows and keys."""
    tensors = dict(tensors)
    for name in ("q", "k", "v"):
        x = tensors[name]
        if not isinstance(x, Tensor) or x.dim() != 3 or is_dtensor(x):
            raise ArgumentError(name, x, "packed tokens [T, H, D], no DTensor", EXAMPLE)
        tensors[name] = x.transpose(0, 1)[None]
    rows, keys = (max((d[n].stop for d in documents), default=0) for n in (0, 1))
    return tensors, (rows, keys)


def arguments_of(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors and the other keywords of a public function's call, which are among its `locals()`."""
    return {name: given[name] for name in TENSORS if name in given}, {name: given[name] for name in KEYWORDS}


class Prepared(NamedTuple):
    """A rank's call with its place in the whole, and its scheme."""

    call: Call
    rows: Layout
    keys: Layout
    workload: Workload
    scheme: str


def prepared(
    tensors: dict[str, Any], keywords: dict[str, Any], placing: Placing, documents: tuple[Document, ...] | None
) -> Prepared:
    """Check a call, with the other ranks if that is asked for, and choose its scheme."""
    mesh, call, lists = placing.mesh, None, None
    described: Description | str = ""
    grid = grid_of(mesh)
    assert mesh is not None
    try:
        accepted(placing.layout)
        tensors, lists = without_lists(tensors)
        call = placing.within(normalized(tensors, keywords))
        if placing.check:  # it waits for the device
            seed = keywords["dropout_seed"]
            described = Description.of(call, placing.layout, placing.scheme, placing.length, documents, seed)
    except AttentionError as error:
        if not placing.check:
            raise
        described = str(error)
    lengths = placing.length if isinstance(placing.length, tuple) else (placing.length, placing.length)
    numbers: tuple[list[int], ...] = ()
    if placing.check:
        numbers = agree(grid, described)
        lengths = tuple(sum(n) if given is None else given for n, given in zip(numbers, lengths, strict=True))  # type: ignore[assignment]
    assert call is not None
    rows, keys = layouts_of(call, placing.layout, grid, lengths, numbers)
    if lists is not None and documents is None:
        lists.reject_lengths(EXAMPLE, rows.length, keys.length)
    elif lists is not None:
        lists.reject_packed(VARLEN_EXAMPLE)
    call = with_own_pairs(call, rows, keys.length, grid.rank, None if documents is None else len(documents))
    workload = workload_of(call, rows, keys, documents)
    return Prepared(call, rows, keys, workload, scheme_of(placing.scheme, mesh, workload))


def run(
    tensors: dict[str, Any], keywords: dict[str, Any], placing: Placing, documents: tuple[Document, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of this rank's rows."""
    ready = prepared(tensors, keywords, placing, documents)
    return run_scheme(ready, grid_of(placing.mesh, heads=ready.scheme == "ulysses"), documents)


def layouts_of(
    call: Call, layout: str | Layout, grid: Grid, lengths: tuple[int | None, ...], numbers: tuple[list[int], ...]
) -> tuple[Layout, Layout]:
    """The layouts of rows and keys, of which this rank has its own, and all ranks theirs if that was asked."""
    layouts = []
    for argument, x, length, checked in zip(
        ("q", "k"), call.tensors[:2], lengths, numbers or (None, None), strict=True
    ):
        found = layout_of(argument, layout, x.shape[2], grid.size, length)
        expected = [found.rows(rank) for rank in range(grid.size)]
        if checked is not None and checked != expected:
            raise ArgumentError(argument, f"{checked} rows on the ranks", f"{expected}, as `shard` gives them", EXAMPLE)
        if x.shape[2] != expected[grid.rank]:
            accepted = f"{expected[grid.rank]} rows on rank {grid.rank}, as `shard` gives them of {found.length}"
            raise ArgumentError(argument, x, accepted, EXAMPLE)
        layouts.append(found)
    return layouts[0], layouts[1]


def depends_on_positions(t: Tensors, s: Settings) -> bool:
    """Whether a score depends on the places of its row and key beyond the window."""
    functions = s.dropout_p > 0 or s.score_mod is not None or s.mask_mod is not None
    return functions or any(x is not None for x in (t.mask, t.bias, t.alibi_slopes))


def run_scheme(ready: Prepared, grid: Grid, documents: tuple[Document, ...] | None) -> tuple[Tensor, Tensor]:
    """Exchange rows for heads within the inner group, attend over the keys of the outer group, and exchange back."""
    call, rows, keys, _, scheme = ready
    inner, tensors, settings = grid.inner, call.tensors._replace(out=None), call.settings
    if inner.size > 1:
        ranks = range(grid.outer.rank * inner.size, (grid.outer.rank + 1) * inner.size)
        own_rows, own_keys = Placement.within(rows, ranks), Placement.within(keys, ranks)
        num_heads = tensors.q.shape[1]
        settings = settings_of_heads(settings, inner.rank * num_heads // inner.size, num_heads)
        tensors = ulysses.to_heads(tensors, inner, own_rows, own_keys)
    everything = Document(Piece(0, rows.length), Piece(0, keys.length))
    whole = Whole(
        settings,
        Placement.of(rows, inner.size),
        Placement.of(keys, inner.size),
        (everything,) if documents is None else documents,
        documents is not None,
        depends_on_positions(tensors, settings),
    )
    outer = "gather" if scheme.startswith("gather") else "ring"
    out, lse = Sharded.apply(outer, whole, grid.outer, *tensors.flat())
    if inner.size > 1:
        out = ulysses.to_rows(out, inner, own_rows)
        lse = ulysses.to_rows(lse[..., None], inner, own_rows)[..., 0]
    return out, lse
