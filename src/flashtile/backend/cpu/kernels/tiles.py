"""Tasks and their rows and keys: dense, packed or paged sequences, grouped-query heads, windows, splits over keys.

The query heads that share a key head are packed: row `r` of a sequence is position `r // groups` of the group's head
`r % groups`. A task has a few panels of such rows, one key head, and one split of the keys. Tables hold each row's
address and visible keys, so the code after them does not depend on sequences, heads or layouts. Padding rows at the
end of the vectors in use are copies of the last row and are never stored; vectors without rows are left out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..tables import SEQUENCE_FIELDS, UNLIMITED
from ..variant import Variant
from .buffers import Workspace
from .codegen import Code
from .fields import Arguments
from .formats import load, load_vector, store, store_vector, transpose
from .operands import ADDRESS, INT, LONG, Pointer, Value
from .products import Panel


class TaskFields(NamedTuple):
    """A task's sequence, key head, rows and keys."""

    b: Value
    kv_head: Value
    split: Value
    first_row: Value  # packed row where the task begins
    num_rows: Value  # packed rows of the sequence
    q_first: Value  # offset of the sequence's first query token
    k_first: Value
    diagonal: Value  # seqlen_k - seqlen_q, plus the call's shift
    first_key: Value  # this split's, inclusive
    last_key: Value  # inclusive
    tile: Value | None = None  # in forward: the number of the task without its split


class Task:
    """The task at hand, as `store` has left it in the workspace. Fields are loaded once at a function's start: whoever
    stores a task calls functions that read it.
    """

    def __init__(self, code: Code, w: Workspace):
        self._code, self._w = code, w
        self._loaded: dict[str, Value] = {}

    def __getattr__(self, name: str) -> Value:
        if name not in self._loaded:
            buffer = self._w.task
            with self._code.function_start():
                self._loaded[name] = buffer[TaskFields._fields.index(name)]
        return self._loaded[name]

    def store(self, fields: TaskFields) -> None:
        for name, x in fields._asdict().items():
            if x is not None:
                self.set(name, x)

    def set(self, name: str, x: Value) -> None:
        self._w.task[TaskFields._fields.index(name)] = x


def find_task(code: Code, a: Arguments, panel: Panel, task_index: Value) -> TaskFields:
    """The forward task with this index. Splits vary fastest, then row tiles, heads and sequences."""
    splits = a.integer("splits")
    split, task_index = task_index % splits, task_index // splits
    sequences = a.pointer("sequences", LONG)
    # Binary search for the last sequence whose first task is at or before this one.
    low, high = code.variable(code.index(0)), code.variable(a.integer("batch"))
    with code.loop_forever() as done:
        code.break_if(high.get() - low.get() <= 1, done)
        middle = (low.get() + high.get()) // 2
        starts_before = sequences[middle * len(SEQUENCE_FIELDS)] <= task_index
        low.set(code.select(starts_before, middle, low.get()))
        high.set(code.select(starts_before, high.get(), middle))
    b = low.get()
    within = task_index - sequences[b * len(SEQUENCE_FIELDS)]
    tile_rows = a.integer("panels") * panel.rows
    tiles = (
        sequences[b * len(SEQUENCE_FIELDS) + SEQUENCE_FIELDS.index("seqlen_q")] * a.integer("groups") + tile_rows - 1
    ) // tile_rows
    first_row = (tiles - 1 - within % tiles) * tile_rows  # last rows first: under a causal mask they take longest
    return make_task(code, a, b, within // tiles, split, first_row)._replace(tile=task_index)


def make_task(code: Code, a: Arguments, b: Value, kv_head: Value, split: Value, first_row: Value) -> TaskFields:
    sequences = a.pointer("sequences", LONG)
    _, q_first, k_first, seqlen_q, seqlen_k, leftpad = (
        sequences[b * len(SEQUENCE_FIELDS) + n] for n in range(len(SEQUENCE_FIELDS))
    )
    first_key = split * a.integer("chunk")
    return TaskFields(
        b=b,
        kv_head=kv_head,
        split=split,
        first_row=first_row,
        num_rows=seqlen_q * a.integer("groups"),
        q_first=q_first,
        k_first=k_first,
        diagonal=seqlen_k - seqlen_q + a.integer("diagonal"),
        first_key=code.maximum(first_key, leftpad),
        last_key=code.minimum(first_key + a.integer("chunk"), seqlen_k) - 1,
    )


def fill_row_tables(
    code: Code, a: Arguments, variant: Variant, panel: Panel, task: Task, w: Workspace, p: Value
) -> None:
    """Fill the tables of panel `p` and its bounds: all visible keys are in `[lo, hi)`, and every row sees all keys in
    `[full_lo, full_hi)`.
    """
    lo, full_lo = code.variable(code.index(UNLIMITED)), code.variable(code.index(0))
    full_hi, hi = code.variable(code.index(UNLIMITED)), code.variable(code.index(0))
    reads_lanes = variant.bias is not None or variant.mask or variant.functions is not None
    count = rows_in_use if reads_lanes or not variant.decode else num_valid_rows
    with panel_rows(code, a, panel, task, p, count(code, panel, task, p)) as (r, i, h):
        at = p * panel.rows + r
        token = task.q_first + i
        lse_offset = task.b * a.integer("lse_b") + h * a.integer("lse_h") + token * a.integer("lse_s")
        w.q_offsets[at] = task.b * a.integer("q_b") + h * a.integer("q_h") + token * a.integer("q_s")
        w.out_offsets[at] = task.b * a.integer("out_b") + h * a.integer("out_h") + token * a.integer("out_s")
        w.lse_offsets[at] = lse_offset
        if variant.bias is not None:
            w.bias_offsets[at] = task.b * a.integer("bias_b") + h * a.integer("bias_h") + i * a.integer("bias_i")
        if variant.mask:
            w.mask_offsets[at] = task.b * a.integer("mask_b") + h * a.integer("mask_h") + i * a.integer("mask_i")
        position = i + a.integer("i0")
        diagonal_key = position + task.diagonal - a.integer("j0")  # the key on this row's diagonal
        low = code.maximum(diagonal_key - a.integer("window_left"), task.first_key)
        right = code.minimum(
            diagonal_key + a.integer("window_right"), position - a.integer("j0") + a.integer("top_left")
        )
        if variant.chunk:
            first = first_of_chunk(code, a, diagonal_key)
            low = code.maximum(low, first)
            right = code.minimum(right, first + a.integer("attention_chunk") - 1)
        high = code.minimum(right, task.last_key)
        low = code.minimum(low, task.last_key + 1)
        high = code.maximum(high, -1)
        w.low[at], w.high[at] = code.convert(low, INT), code.convert(high, INT)
        lo.set(code.minimum(lo.get(), low))
        full_lo.set(code.maximum(full_lo.get(), low))
        full_hi.set(code.minimum(full_hi.get(), high + 1))
        hi.set(code.maximum(hi.get(), high + 1))
        if variant.head_terms:
            w.diagonal_key[at] = code.convert(diagonal_key, INT)
        for symbol in variant.head_terms:
            x = a.pointer(symbol)[task.b * a.integer(f"{symbol}_b") + h]
            getattr(w, symbol)[at] = x * variant.score_unit
        if variant.dropout or variant.functions is not None:
            w.position[at] = code.convert(position, INT)
        if variant.functions is not None:
            w.head[at] = code.convert(h + a.integer("h0"), INT)
        if variant.dropout:
            sequence_head = (task.b + a.integer("b0")) * a.integer("num_heads") + h + a.integer("h0")
            w.sequence_head[at] = code.convert(sequence_head, INT)
    for n, bound in enumerate((lo, full_lo, full_hi, hi)):
        w.bounds[p * 4 + n] = bound.get()


def first_of_chunk(code: Code, a: Arguments, diagonal_key: Value) -> Value:
    """The first key of the chunk that the key on a row's diagonal is in. Where that is before all keys, so are all of
    its chunk: one chunk stands for all of those, because division is unsigned.
    """
    position, chunk = diagonal_key + a.integer("j0"), a.integer("attention_chunk")
    first = code.select(position < 0, 0 - chunk, position // chunk * chunk)
    return first - a.integer("j0")


def num_valid_rows(code: Code, panel: Panel, task: Task, p: Value) -> Value:
    """The number of rows of panel `p` without padding."""
    return code.minimum(task.num_rows - task.first_row - p * panel.rows, panel.rows)


def rows_in_use(code: Code, panel: Panel, task: Task, p: Value) -> Value:
    """The rows of the narrowest panel that holds the valid rows of panel `p`: later ones are never read."""
    num_valid, rows = num_valid_rows(code, panel, task, p), code.index(panel.rows)
    for narrower in reversed(panel.widths()[:-1]):
        width = narrower.vectors * code.lanes
        rows = code.select(num_valid <= width, code.index(width), rows)
    return rows


def packed_row(code: Code, panel: Panel, task: Task, p: Value, r: Value) -> Value:
    return code.minimum(task.first_row + p * panel.rows + r, task.num_rows - 1)


def position_and_head(a: Arguments, task: Task, row: Value) -> tuple[Value, Value]:
    groups = a.integer("groups")
    return row // groups, task.kv_head * groups + row % groups


@contextmanager
def panel_rows(
    code: Code, a: Arguments, panel: Panel, task: Task, p: Value, count: Value
) -> Iterator[tuple[Value, Value, Value]]:
    """Loop over the first `count` rows of panel `p`: the row's number in the panel, its position and its head. Only the
    first one is found by a division, which would take longer than all else of a row.
    """
    first, groups = task.first_row + p * panel.rows, a.integer("groups")
    start, first_head = position_and_head(a, task, first)
    i, h = code.variable(start), code.variable(first_head)
    last_head = task.kv_head * groups + (groups - 1)
    with code.loop(0, count) as r:
        yield r, i.get(), h.get()
        with code.if_then(first + r + 1 < task.num_rows):  # else padding
            is_last = h.get().equals(last_head)
            i.set(i.get() + code.select(is_last, code.index(1), 0))
            h.set(code.select(is_last, last_head - (groups - 1), h.get() + 1))


def load_transposed(
    code: Code,
    panel: Panel,
    source: Pointer,
    row_offsets: Pointer,
    rows: Value,
    count: Value,
    stride: Value,
    dtype: str,
    to: Pointer,
    factor: Value,
) -> None:
    """`to[d, r] = factor * source[row_offsets[r] + d * stride]` for `d < count` and the first `rows` rows, whole
    vectors: rows become lanes.

    Squares of lanes by lanes are transposed in registers; the remainder, and columns that are not contiguous, are
    loaded one element at a time.
    """
    code.part(f"load_transposed_{dtype}_{panel.rows}", lambda code: emit_load_transposed(code, panel.rows, dtype))
    code.call(f"load_transposed_{dtype}", source, row_offsets, rows, count, stride, to, factor)


def emit_load_transposed(code: Code, panel_rows: int, dtype: str) -> None:
    kinds = (ADDRESS, ADDRESS, LONG, LONG, LONG, ADDRESS, code.real_type)
    for args in code.part_function(f"load_transposed_{dtype}", *kinds):
        source, row_offsets, to = code.pointer(args[0]), code.pointer(args[1], LONG), code.pointer(args[5])
        rows, count, stride, factor = args[2], args[3], args[4], args[6]
        full = code.select(stride.equals(1), count // code.lanes * code.lanes, 0)
        with code.loop(0, full, code.lanes) as d, code.loop(0, rows, code.lanes) as r:
            square = [load_vector(code, source, row_offsets[r + n] + d, dtype) for n in range(code.lanes)]
            for n, column in enumerate(transpose(code, square)):
                to.store(column * factor, (d + n) * panel_rows + r)
        with code.loop(full, count) as d, code.loop(0, rows) as r:
            to[d * panel_rows + r] = load(code, source, row_offsets[r] + d * stride, dtype) * factor


def copy_rows(
    code: Code, source: Pointer, row_offsets: Pointer, rows: Value, count: Value, dtype: str, to: Pointer, width: Value
) -> None:
    """`to[r, d] = source[row_offsets[r] + d]` for `d < count`, and 0 from there to `width`."""
    full = count // code.lanes * code.lanes
    with code.loop(0, rows) as r:
        row, at = to + r * width, row_offsets[r]
        with code.loop(0, full, code.lanes) as d:
            row.store(load_vector(code, source, at + d, dtype), d)
        with code.loop(full, count) as d:
            row[d] = load(code, source, at + d, dtype)
        with code.loop(count, width) as d:
            row[d] = code.real(0)


def store_transposed(
    code: Code, panel: Panel, source: Pointer, count: Value, dtype: str, to: Pointer, row_offsets: Pointer, rows: Value
) -> None:
    """`to[row_offsets[r] + d] = source[d, r]` for `d < count` and the first `rows` rows: lanes become rows."""
    code.part(f"store_transposed_{dtype}_{panel.rows}", lambda code: emit_store_transposed(code, panel.rows, dtype))
    code.call(f"store_transposed_{dtype}", source, count, to, row_offsets, rows)


def emit_store_transposed(code: Code, panel_rows: int, dtype: str) -> None:
    for args in code.part_function(f"store_transposed_{dtype}", ADDRESS, LONG, ADDRESS, ADDRESS, LONG):
        source, to, row_offsets = code.pointer(args[0]), code.pointer(args[2]), code.pointer(args[3], LONG)
        count, rows = args[1], args[4]
        full = count // code.lanes * code.lanes
        with code.loop(0, full, code.lanes) as d, code.loop(0, rows, code.lanes) as r:
            square = [source.vector((d + n) * panel_rows + r) for n in range(code.lanes)]
            for n, row in enumerate(transpose(code, square)):
                with code.if_then(r + n < rows):
                    store_vector(code, row, to, row_offsets[r + n] + d, dtype)
        with code.loop(full, count) as d, code.loop(0, rows) as r:
            store(code, source[d * panel_rows + r], to, row_offsets[r] + d, dtype)
