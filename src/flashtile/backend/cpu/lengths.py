"""The table of sequences that a kernel reads: where each one begins in memory, how long it is, and its first task."""

import functools
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...call.call import Call
from .support import SPLIT_KEYS
from .tables import SEQUENCE_FIELDS, UNLIMITED
from .targets import requested_width
from .workspace import BLOCK_N


class Lengths(NamedTuple):
    """The table of sequences (`tables.SEQUENCE_FIELDS`), and the sizes that the host derives from it."""

    table: np.ndarray
    batch: int
    tasks: int
    max_seqlen_k: int
    max_rows: int  # packed query rows of the longest sequence
    unused: tuple[slice, ...]  # packed query tokens that belong to no sequence


def lengths(call: Call, heads_kv: int, groups: int, rows: int) -> Lengths:
    """Build the table for tasks of `rows` packed query rows."""
    if call.layout == "dense":
        q, k = call.tensors.q, call.tensors.k
        return dense_lengths(q.shape[0], q.shape[2], k.shape[2], heads_kv, groups, rows)
    if call.tensors.cu_seqlens_q is None:
        return cache_lengths(call, heads_kv, groups, rows)
    return packed_lengths(call, heads_kv, groups, rows)


@functools.lru_cache(maxsize=256)
def dense_lengths(batch: int, seqlen_q: int, seqlen_k: int, heads_kv: int, groups: int, rows: int) -> Lengths:
    """The table of `batch` sequences of equal lengths."""
    tiles = -(-seqlen_q * groups // rows)
    table = np.zeros((batch + 1, len(SEQUENCE_FIELDS)), dtype=np.int64)
    table[:, SEQUENCE_FIELDS.index("first_task")] = np.arange(batch + 1) * (tiles * heads_kv)
    table[:, SEQUENCE_FIELDS.index("seqlen_q")] = seqlen_q
    table[:, SEQUENCE_FIELDS.index("seqlen_k")] = seqlen_k
    return Lengths(table, batch, batch * tiles * heads_kv, seqlen_k, seqlen_q * groups, ())


def cache_lengths(call: Call, heads_kv: int, groups: int, rows: int) -> Lengths:
    """The table of dense queries over pages. All lengths are on the host and validated."""
    t = call.tensors
    of_queries = dense_lengths(t.q.shape[0], t.q.shape[2], 0, heads_kv, groups, rows)
    table = of_queries.table.copy()
    assert t.seqused_k is not None or t.cu_seqlens_k is not None
    seqlen_k = t.cu_seqlens_k.diff() if t.seqused_k is None else t.seqused_k  # type: ignore[union-attr]
    for name, column in (("seqlen_k", seqlen_k), ("leftpad", t.leftpad_k)):
        if column is not None:
            table[:-1, SEQUENCE_FIELDS.index(name)] = column.numpy()
    return of_queries._replace(table=table, max_seqlen_k=max(seqlen_k.tolist(), default=0))


def packed_lengths(call: Call, heads_kv: int, groups: int, rows: int) -> Lengths:
    """The table of packed sequences, over packed keys or pages. All lengths are on the host and validated."""
    t = call.tensors
    assert t.cu_seqlens_q is not None

    def to_numpy(x: Tensor) -> np.ndarray:
        return x.numpy().astype(np.int64)

    bounds = to_numpy(t.cu_seqlens_q)
    q_first, seqlen_q = bounds[:-1], np.diff(bounds)
    batch = len(q_first)
    starts, stops = [int(bounds[-1])], [t.q.shape[0]]
    if t.seqused_q is not None:
        seqlen_q = np.minimum(seqlen_q, to_numpy(t.seqused_q))
        starts, stops = starts + (q_first + seqlen_q).tolist(), stops + bounds[1:].tolist()
    unused = tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop)
    k_first = np.zeros(batch, dtype=np.int64)
    seqlen_k = None if t.seqused_k is None else to_numpy(t.seqused_k)
    if t.cu_seqlens_k is not None and t.page_table is None:
        bounds = to_numpy(t.cu_seqlens_k)
        k_first, capacity = bounds[:-1], np.diff(bounds)
        seqlen_k = capacity if seqlen_k is None else np.minimum(seqlen_k, capacity)
    elif seqlen_k is None:
        assert t.cu_seqlens_k is not None
        seqlen_k = np.diff(to_numpy(t.cu_seqlens_k))
    tasks = -(-seqlen_q * groups // rows) * heads_kv
    table = np.zeros((batch + 1, len(SEQUENCE_FIELDS)), dtype=np.int64)
    table[1:, 0] = np.cumsum(tasks)
    columns = {"q_first": q_first, "k_first": k_first, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    if t.leftpad_k is not None:
        columns["leftpad"] = to_numpy(t.leftpad_k)
    for name, column in columns.items():
        table[:-1, SEQUENCE_FIELDS.index(name)] = column
    max_rows = int(seqlen_q.max(initial=0)) * groups
    return Lengths(table, batch, int(table[-1, 0]), int(seqlen_k.max(initial=0)), max_rows, unused)


def used_splits(most: int, least: int, max_seqlen_k: int, split_keys: int | None = None) -> int:
    """Splits of the keys: a cache may have room for many, and hold few. Each split has `split_keys` keys, if they
    do not depend on the longest sequence.
    """
    return max(least, min(most, max_seqlen_k // SPLIT_KEYS if split_keys is None else -(-max_seqlen_k // split_keys)))


def chunk(max_seqlen_k: int, splits: int, split_keys: int | None = None) -> int:
    """Keys of one split, a multiple of the block size."""
    if split_keys is not None:
        return split_keys
    return -(-max_seqlen_k // (splits * BLOCK_N)) * BLOCK_N if splits > 1 else UNLIMITED


def max_threads(call: Call, lengths: Lengths, rows: int) -> int:
    """The largest number of threads that each have enough work to be worth waking."""
    width = call.tensors.q.shape[-1] + call.tensors.v.shape[-1]
    return threads_for(work_per_key(lengths.tasks, rows, width), lengths.max_seqlen_k)


def work_per_key(tasks: int, rows: int, width: int) -> int:
    """Multiply-adds of all rows with one key, and with its value; loading both takes as long as some rows' products."""
    return int(tasks * max(rows, rates(requested_width())[1]) * width)


def threads_for(work_per_key: int, seqlen_k: int) -> int:
    """As `max_threads`, from the multiply-adds of all rows with one key."""
    return max(1, int(work_per_key * seqlen_k // rates(requested_width())[0]))


@functools.cache
def rates(width: str | None) -> tuple[float, float]:
    """Multiply-adds that are worth a thread, and rows whose products take as long as loading a key and its value."""
    from .rates import rates_here  # reads a file

    found = rates_here()
    return found.work_per_thread, found.rows_of_a_read
