"""Which rows and keys a task has: dense, packed or paged sequences, heads that share keys, and splits over keys.

The query heads that share a key head are packed: row `r` of a sequence is position `r // groups` of the group's head
`r % groups`. A task is a few panels of such rows with one key head and one split of the keys. For each row a table
says where it lies and which keys it sees, so that nothing later knows of sequences, heads or layouts. Rows past the
last one are copies of it, which nobody stores.
"""

from typing import NamedTuple

from ..variant import Arguments, Variant
from ..workspace import Workspace
from .codegen import Code
from .formats import STORED, load, load_vector, store, store_vector, transposed
from .operands import ADDRESS, INT, LONG, Pointer, Value
from .products import Panel

SEQUENCE = ("first_task", "q_first", "k_first", "seqlen_q", "seqlen_k", "leftpad")  # a row of the table of sequences
UNLIMITED = 2**40  # of a window's side


class Task(NamedTuple):
    """A task's sequence, key head, rows and keys."""

    b: Value
    kv_head: Value
    split: Value
    first_row: Value  # of the packed rows
    num_rows: Value  # of the sequence, packed
    q_first: Value  # tokens in front of the sequence
    k_first: Value
    diagonal: Value  # seqlen_k - seqlen_q of the whole sequence
    first_key: Value  # of this split
    last_key: Value


def locate(code: Code, a: Arguments, panel: Panel, number: Value) -> Task:
    """A task of the forward pass by its number: splits of one tile lie together, then tiles of one head."""
    splits = a.number("splits")
    split, number = number % splits, number // splits
    sequences = a.pointer("sequences", LONG)
    # The last sequence that begins at or before this task.
    low, high = code.variable(code.whole(0)), code.variable(a.number("batch"))
    with code.forever() as found:
        code.leave_if(high.get() - low.get() <= 1, found)
        middle = (low.get() + high.get()) // 2
        before = sequences[middle * len(SEQUENCE)] <= number
        low.set(code.select(before, middle, low.get()))
        high.set(code.select(before, high.get(), middle))
    b = low.get()
    within = number - sequences[b * len(SEQUENCE)]
    tile_rows = a.number("panels") * panel.rows
    tiles = (
        sequences[b * len(SEQUENCE) + SEQUENCE.index("seqlen_q")] * a.number("groups") + tile_rows - 1
    ) // tile_rows
    first_row = (tiles - 1 - within % tiles) * tile_rows  # under a causal mask the longest first
    return task_of(code, a, b, within // tiles, split, first_row)


def task_of(code: Code, a: Arguments, b: Value, kv_head: Value, split: Value, first_row: Value) -> Task:
    sequences = a.pointer("sequences", LONG)
    _, q_first, k_first, seqlen_q, seqlen_k, leftpad = (sequences[b * len(SEQUENCE) + n] for n in range(len(SEQUENCE)))
    first_key = split * a.number("chunk")
    return Task(
        b=b,
        kv_head=kv_head,
        split=split,
        first_row=first_row,
        num_rows=seqlen_q * a.number("groups"),
        q_first=q_first,
        k_first=k_first,
        diagonal=seqlen_k - seqlen_q + a.number("diagonal"),
        first_key=code.maximum(first_key, leftpad),
        last_key=code.minimum(first_key + a.number("chunk"), seqlen_k) - 1,
    )


def fill_rows(code: Code, a: Arguments, variant: Variant, panel: Panel, task: Task, w: Workspace, p: Value) -> None:
    """The tables of panel `p`, and its bounds `[lo, full_lo, full_hi, hi)`: keys outside `[lo, hi)` no row sees, those
    in `[full_lo, full_hi)` every row.
    """
    lo, full_lo = code.variable(code.whole(UNLIMITED)), code.variable(code.whole(0))
    full_hi, hi = code.variable(code.whole(UNLIMITED)), code.variable(code.whole(0))
    with code.loop(0, panel.rows) as r:
        row = packed_row(code, panel, task, p, r)
        i, h = position_and_head(a, task, row)
        at = p * panel.rows + r
        token = task.q_first + i
        lse_at = task.b * a.number("lse_b") + h * a.number("lse_h") + token * a.number("lse_s")
        w.q_at[at] = task.b * a.number("q_b") + h * a.number("q_h") + token * a.number("q_s")
        w.out_at[at] = task.b * a.number("out_b") + h * a.number("out_h") + token * a.number("out_s")
        w.lse_at[at] = lse_at
        if variant.bias is not None:
            w.bias_at[at] = task.b * a.number("bias_b") + h * a.number("bias_h") + i * a.number("bias_i")
        if variant.mask:
            w.mask_at[at] = task.b * a.number("mask_b") + h * a.number("mask_h") + i * a.number("mask_i")
        position = i + a.number("i0")
        place = position + task.diagonal - a.number("j0")  # as far along the keys as the row is
        low = code.maximum(place - a.number("window_left"), task.first_key)
        right = code.minimum(place + a.number("window_right"), position - a.number("j0") + a.number("top_left"))
        high = code.minimum(right, task.last_key)
        low = code.minimum(low, task.last_key + 1)
        high = code.maximum(high, -1)
        w.low[at], w.high[at] = code.convert(low, INT), code.convert(high, INT)
        lo.set(code.minimum(lo.get(), low))
        full_lo.set(code.maximum(full_lo.get(), low))
        full_hi.set(code.minimum(full_hi.get(), high + 1))
        hi.set(code.maximum(hi.get(), high + 1))
        if variant.alibi:
            w.place[at] = code.convert(place, INT)
            w.slope[at] = a.pointer("slopes")[task.b * a.number("slopes_b") + h] * variant.unit
        if variant.dropout:
            w.position[at] = code.convert(position, INT)
            sequence_head = (task.b + a.number("b0")) * a.number("num_heads") + h + a.number("h0")
            w.sequence_head[at] = code.convert(sequence_head, INT)
    for n, bound in enumerate((lo, full_lo, full_hi, hi)):
        w.bounds[p * 4 + n] = bound.get()


def rows_left(code: Code, panel: Panel, task: Task, p: Value) -> Value:
    """Rows of panel `p` that are not copies."""
    return code.minimum(task.num_rows - task.first_row - p * panel.rows, panel.rows)


def packed_row(code: Code, panel: Panel, task: Task, p: Value, r: Value) -> Value:
    return code.minimum(task.first_row + p * panel.rows + r, task.num_rows - 1)


def position_and_head(a: Arguments, task: Task, row: Value) -> tuple[Value, Value]:
    groups = a.number("groups")
    return row // groups, task.kv_head * groups + row % groups


def turn_in(
    code: Code,
    panel: Panel,
    source: Pointer,
    rows_at: Pointer,
    count: Value,
    step: Value,
    name: str,
    to: Pointer,
    factor: Value,
) -> None:
    """`to[d] = factor * source[rows_at + d * step]` for `d < count`: rows become lanes.

    Squares of as many rows and columns as a vector has lanes are turned over in registers; a column at a time does
    what is left, and what is not contiguous.
    """
    kinds = (ADDRESS, ADDRESS, LONG, LONG, ADDRESS, code.real)
    with code.shared_function(f"turn_in_{name}", *kinds) as given:
        if given:
            source_, rows_at_, to_ = code.pointer(given[0]), code.pointer(given[1], LONG), code.pointer(given[4])
            count_, step_, factor_ = given[2], given[3], given[5]
            whole = code.select(step_.equals(1), count_ // code.lanes * code.lanes, 0)
            with code.loop(0, whole, code.lanes) as d, code.loop(0, panel.rows, code.lanes) as r:
                square = [load_vector(code, source_, rows_at_[r + n] + d, name) for n in range(code.lanes)]
                for n, column in enumerate(transposed(code, square)):
                    to_.store(column * factor_, (d + n) * panel.rows + r)
            with code.loop(whole, count_) as d, code.loop(0, panel.rows) as r:
                to_[d * panel.rows + r] = load(code, source_, rows_at_[r] + d * step_, name) * factor_
    code.call(f"turn_in_{name}", source, rows_at, count, step, to, factor)


def copy_rows(
    code: Code, panel: Panel, source: Pointer, rows_at: Pointer, count: Value, name: str, to: Pointer, width: Value
) -> None:
    """`to[r, d] = source[rows_at[r] + d]` for `d < count`, and 0 from there to `width`."""
    whole = count // code.lanes * code.lanes
    with code.loop(0, panel.rows) as r:
        row, at = to + r * width, rows_at[r]
        with code.loop(0, whole, code.lanes) as d:
            row.store(load_vector(code, source, at + d, name), d)
        with code.loop(whole, count) as d:
            row[d] = load(code, source, at + d, name)
        with code.loop(count, width) as d:
            row[d] = code.number(0)


def turn_out(
    code: Code, panel: Panel, source: Pointer, count: Value, name: str, to: Pointer, rows_at: Pointer, rows: Value
) -> None:
    """`to[rows_at + d] = source[d]` for `d < count` and the first `rows` rows: lanes become rows again."""
    kinds = (ADDRESS, LONG, ADDRESS, ADDRESS, LONG)
    with code.shared_function(f"turn_out_{name}", *kinds) as given:
        if given:
            source_, to_, rows_at_ = code.pointer(given[0]), code.pointer(given[2]), code.pointer(given[3], LONG)
            count_, rows_ = given[1], given[4]
            whole = count_ // code.lanes * code.lanes
            with code.loop(0, whole, code.lanes) as d, code.loop(0, rows_, code.lanes) as r:
                square = [source_.vector((d + n) * panel.rows + r) for n in range(code.lanes)]
                for n, row in enumerate(transposed(code, square)):
                    with code.when(r + n < rows_):
                        store_vector(code, row, to_, rows_at_[r + n] + d, name)
            with code.loop(whole, count_) as d, code.loop(0, rows_) as r:
                store(code, source_[d * panel.rows + r], to_, rows_at_[r] + d, name)
    code.call(f"turn_out_{name}", source, count, to, rows_at, rows)


class Keys(NamedTuple):
    """Where a block of keys, or of their values, can be read: rows of one stride."""

    first: Pointer
    stride: Value


def read_keys(
    code: Code,
    a: Arguments,
    variant: Variant,
    task: Task,
    side: str,
    first: Value,
    last: Value,
    scratch: Pointer,
    dtype: str | None = None,
) -> Keys:
    """Keys `first..last`, exclusive, of `side` "k" or "v", as `dtype` or else as reals: where they lie if they are that
    already and have one stride, otherwise copied to `scratch`.
    """
    wanted = variant.real_name if dtype is None else dtype
    kind = STORED[wanted]
    source, table = a.pointer(side, kind), a.pointer("page_table", LONG)
    page_size, step = a.number("page_size"), a.number(f"{side}_s")
    width = a.number("head_dim" if side == "k" else "head_dim_v")
    of_head, scratch = task.kv_head * a.number(f"{side}_h"), scratch.of(kind)

    def place(j: Value) -> Value:
        at = code.variable(task.b * a.number(f"{side}_b") + of_head + (task.k_first + j) * step)
        with code.when(table.absent().equals(0)):
            page = table[task.b * a.number("page_columns") + j // page_size]
            at.set(page * a.number(f"{side}_b") + of_head + j % page_size * step)
        return at.get()

    def copy() -> None:
        whole = width // code.lanes * code.lanes
        with code.loop(first, last) as j:
            at, to = place(j), scratch + (j - first) * width
            with code.loop(0, whole, code.lanes) as d:
                x = (
                    source.vector(at + d)
                    if wanted == variant.dtype
                    else load_vector(code, source, at + d, variant.dtype)
                )
                to.store(x, d)
            with code.loop(whole, width) as d:
                to[d] = source[at + d] if wanted == variant.dtype else load(code, source, at + d, variant.dtype)

    if wanted != variant.dtype:
        copy()
        return Keys(scratch, width)
    found, stride = code.variable(Value(code, scratch.ir)), code.variable(width)
    together = table.absent() | (first // page_size).equals((last - 1) // page_size)
    with code.either(together) as (then, otherwise):
        with then:
            found.set(Value(code, (source + place(first)).ir))
            stride.set(step)
        with otherwise:
            copy()
    return Keys(code.pointer(found.get(), kind), stride.get())
