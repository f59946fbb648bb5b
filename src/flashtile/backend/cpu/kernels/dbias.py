"""The gradient of a bias: a block's `ds`, reduced over what shares an element and added to the result."""

from .formats import sum_lanes
from .kernel import Kernel
from .operands import Value
from .sums import fast_two_sum
from .tiles import num_valid_rows, packed_row, position_and_head


def accumulate_dbias(kernel: Kernel, first: Value, count: Value) -> None:
    """Add a block's `ds`, in `w.dbias`, to dbias: one element after another, since rows, keys and heads may share them.
    Keys of a block that share an element are summed before, and so are rows.
    """
    code, a, w, task, panel_rows = kernel.code, kernel.a, kernel.w, kernel.task, kernel.panel.rows
    share_j, share_i, share_h = (a.integer(f"dbias_{dim}").equals(0) for dim in "jih")
    share_rows = share_i & (share_h | a.integer("groups").equals(1))
    with code.if_then(share_j):
        reduce_over_keys(kernel, count)
    count = code.select(share_j, code.index(1), count)
    with code.if_then(share_rows):
        reduce_over_rows(kernel, count)
    num_valid = code.select(share_rows, code.index(1), num_valid_rows(code, kernel.panel, task, code.index(0)))
    step = code.select(share_rows, code.index(1), panel_rows)
    dbias, dbias_error = a.pointer("dbias"), a.pointer("dbias_error")
    with code.loop(0, num_valid) as r:
        i, h = position_and_head(a, task, packed_row(code, kernel.panel, task, code.index(0), r))
        row = task.b * a.integer("dbias_b") + h * a.integer("dbias_h") + i * a.integer("dbias_i")
        with code.loop(0, count) as j:
            at, x = row + (first + j) * a.integer("dbias_j"), w.dbias[j * step + r]
            with code.if_else(dbias_error.is_null()) as (plain, compensated):
                with plain:
                    dbias[at] = dbias[at] + x
                with compensated:
                    dbias_error[at], dbias[at] = fast_two_sum(code, dbias_error[at] + x, dbias[at])


def reduce_over_keys(kernel: Kernel, count: Value) -> None:
    """Sum each row over the keys of the block, into the place of the first key."""
    code, w = kernel.code, kernel.w
    with kernel.columns(code.index(0)) as column:
        total = code.variable(code.full())
        with code.loop(0, count) as j:
            total.set(total.get() + w.dbias.vector(j * kernel.panel.rows + column))
        w.dbias.store(total.get(), column)


def reduce_over_rows(kernel: Kernel, count: Value) -> None:
    """Sum each key over the panel's rows, into consecutive elements: a vector of keys at a time. Rows past the last one
    have `ds = 0`.
    """
    code, w, pitch = kernel.code, kernel.w, kernel.panel.rows
    with code.loop(0, count, code.lanes) as first:
        total = [code.variable(code.full()) for _ in range(code.lanes)]
        with kernel.columns(code.index(0)) as column:
            for n, x in enumerate(total):
                x.set(x.get() + w.dbias.vector((first + n) * pitch + column))
        w.dbias.store(sum_lanes(code, [x.get() for x in total]), first)
