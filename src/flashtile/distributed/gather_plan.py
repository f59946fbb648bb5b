"""Which keys a rank gathers for its rows, from whom, and in which chunks of heads: what follows from the layouts."""

import functools
from typing import NamedTuple

from . import parts
from .layout import Placement
from .packed import PackedParts
from .parts import Whole
from .passes import Calls, calls_of
from .visible import needed_keys


class Source(NamedTuple):
    """Rows that follow each other in the tensor of a rank: its own one, or the block that arrives from another one."""

    rank: int
    rows: slice


class Chunk(NamedTuple):
    """Some key heads with their query heads, and the calls over their gathered keys."""

    kv_heads: slice
    heads: slice
    calls: Calls


class GatherPlan(NamedTuple):
    """The exchanges and calls of a rank. Rows of blocks are in ascending order.

    Attributes:
        chunks: of key heads.
        num_keys: that this rank's rows see.
        once: whether no key is seen by two pieces of a rank's rows, on any rank.
        lent: by ranks, the rows of this rank's tensors that they gather.
        borrowed: by ranks, the gathered rows that are theirs.
        own: the rows of this rank's tensors that it sees, and the gathered ones that they are.
        sources: where the keys of the calls come from, in their order.
    """

    chunks: tuple[Chunk, ...]
    num_keys: int
    once: bool
    lent: tuple[tuple[slice, ...], ...]
    borrowed: tuple[tuple[slice, ...], ...]
    own: tuple[tuple[slice, slice], ...]
    sources: tuple[Source, ...]


@functools.lru_cache(maxsize=256)
def gather_plan(whole: Whole, rank: int, heads: int, kv_heads: int) -> GatherPlan:
    """The plan of a rank for a call of `heads` query heads."""
    needed, once = needed_keys(whole.settings.window, whole.documents, whole.rows, whole.keys.length)
    chunks = [
        chunk_of(whole, needed, rank, heads, kv_heads, each)
        for each in chunks_of(heads, kv_heads, whole.rows, whole.keys, needed)
    ]
    ranks = range(len(whole.keys.by_rank))
    shared = [whole.keys.shared(owner, needed, rank) for owner in ranks]
    lent = [[here for here, _ in whole.keys.shared(rank, needed, other)] for other in ranks]
    borrowed = [[there for _, there in pairs] for pairs in shared]
    own, lent[rank], borrowed[rank] = shared[rank], [], []
    return GatherPlan(
        tuple(chunks), needed.rows(rank), once, tuple(map(tuple, lent)), tuple(map(tuple, borrowed)), tuple(own),
        tuple(sources_of(rank, shared, chunks[0].calls)),
    )  # fmt: skip


def chunks_of(heads: int, kv_heads: int, rows: Placement, keys: Placement, needed: Placement) -> list[slice]:
    """Key heads that are gathered together: as few chunks as have no more elements than a rank's q, k, v and out."""
    held = heads * rows.most + kv_heads * keys.most
    counts = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    count = next((n for n in counts if kv_heads // n * needed.most <= held), kv_heads)
    each = kv_heads // count
    return [slice(n * each, (n + 1) * each) for n in range(count)]


def chunk_of(whole: Whole, needed: Placement, rank: int, heads: int, kv_heads: int, each: slice) -> Chunk:
    """The calls of some key heads, in which this rank is the owner of all gathered keys."""
    group_size = heads // kv_heads
    of_q = slice(each.start * group_size, each.stop * group_size)
    settings = parts.settings_of_heads(whole.settings, of_q.start, heads)
    calls = calls_of(whole._replace(settings=settings, keys=needed), rank, rank)
    return Chunk(each, of_q, calls._replace(keys_in_order=True) if isinstance(calls, PackedParts) else calls)


def sources_of(rank: int, shared: list[list[tuple[slice, slice]]], calls: Calls) -> list[Source]:
    """The sources of the keys of calls, which packed ones may have several times."""
    found: list[tuple[slice, Source]] = []  # by gathered rows
    for owner, pairs in enumerate(shared):
        before = 0  # rows of the owner's block
        for here, there in pairs:
            length = here.stop - here.start
            found.append((there, Source(owner, here if owner == rank else slice(before, before + length))))
            before += length
    found.sort(key=lambda pair: pair[0].start)
    if not isinstance(calls, PackedParts):
        return [source for _, source in found]
    return [
        Source(owner, slice(start - there.start + rows.start, stop - there.start + rows.start))
        for run in calls.keys
        for there, (owner, rows) in found
        if (start := max(run.here.start, there.start)) < (stop := min(run.here.stop, there.stop))
    ]
