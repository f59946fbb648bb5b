"""Which keys a rank gathers for its rows, from whom, and in which chunks of heads: what follows from the layouts."""

import functools
from itertools import accumulate
from typing import NamedTuple

from . import parts
from .layout import Placement
from .packed import PackedParts, Run, length
from .parts import Whole
from .passes import Calls, calls_of
from .visible import needed_keys


class Chunk(NamedTuple):
    """Some key heads with their query heads, and the calls over their gathered keys."""

    kv_heads: slice
    heads: slice
    calls: Calls


class GatherPlan(NamedTuple):
    """The exchanges and calls of a rank.

    Attributes:
        chunks: of key heads.
        num_keys: of the calls. Packed ones may have a key several times.
        once: whether no key is seen by two pieces of a rank's rows, on any rank.
        lent: by ranks, the rows of this rank's tensors that they gather, and their places in a block.
        borrowed: by ranks, the rows of their blocks, and their places among the keys of the calls; of this rank, the
            rows of its tensors.
        lent_rows: by ranks, the number of rows of a block that leaves.
        borrowed_rows: by ranks, the number of rows of a block that arrives.
        sources: in the order of the keys of the calls, the rank whose block has them, and their rows in it; of this
            rank, the rows of its tensors.
    """

    chunks: tuple[Chunk, ...]
    num_keys: int
    once: bool
    lent: tuple[tuple[Run, ...], ...]
    borrowed: tuple[tuple[Run, ...], ...]
    lent_rows: list[int]
    borrowed_rows: list[int]
    sources: list[tuple[int, slice]]


@functools.lru_cache(maxsize=256)
def gather_plan(whole: Whole, rank: int, heads: int, kv_heads: int) -> GatherPlan:
    """The plan of a rank for a call of `heads` query heads."""
    needed, once = needed_keys(whole.settings.window, whole.documents, whole.rows, whole.keys.length)
    chunks = [
        chunk_of(whole, needed, rank, heads, kv_heads, each)
        for each in chunks_of(heads, kv_heads, whole.rows, whole.keys, needed)
    ]
    ranks = range(len(whole.keys.by_rank))
    lent = [in_block([here for here, _ in whole.keys.shared(rank, needed, r)] if r != rank else []) for r in ranks]
    shared = [whole.keys.shared(owner, needed, rank) for owner in ranks]
    blocks = [in_block([here for here, _ in pairs]) for pairs in shared]
    lent_rows, borrowed_rows = ([r[-1].there.stop if r else 0 for r in runs] for runs in (lent, blocks))
    borrowed_rows[rank] = 0
    borrowed = [
        [Run(here if r == rank else run.there, there) for run, (here, there) in zip(blocks[r], shared[r], strict=True)]
        for r in ranks
    ]
    if isinstance(calls := chunks[0].calls, PackedParts):
        borrowed = [[run for of_call in calls.keys for run in within(of_call, runs)] for runs in borrowed]
    ordered = sorted(((r, run) for r in ranks for run in borrowed[r]), key=lambda source: source[1].there.start)
    num_keys = ordered[-1][1].there.stop if ordered else 0
    return GatherPlan(
        tuple(chunks), num_keys, once, tuple(map(tuple, lent)), tuple(map(tuple, borrowed)), lent_rows, borrowed_rows,
        [(r, run.here) for r, run in ordered],
    )  # fmt: skip


def in_block(rows: list[slice]) -> list[Run]:
    """Rows with their places in a block, in which they follow each other."""
    stops = [*accumulate(map(length, rows))]
    return [Run(here, slice(stop - length(here), stop)) for here, stop in zip(rows, stops, strict=True)]


def within(of_call: Run, runs: list[Run]) -> list[Run]:
    """What a run of a packed call has of gathered keys, with places in the call."""
    found = []
    for here, there in runs:
        start, stop = max(of_call.here.start, there.start), min(of_call.here.stop, there.stop)
        if start < stop:
            moved, placed = here.start - there.start, of_call.there.start - of_call.here.start
            found.append(Run(slice(start + moved, stop + moved), slice(start + placed, stop + placed)))
    return found


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
