"""A panel's dq: `[rows, D]` with lanes of features where its rows are whole vectors, else `[D, rows]`."""

import functools

from ..variant import Variant
from .codegen import Code
from .kernel import Kernel
from .keys import KeyBlock
from .operands import Pointer, Value
from .products import ACCUMULATOR_ROWS, Panel, accumulator_loop, declare_values, value_product
from .row_values import declare_row_values, row_value_product, store_row_vectors
from .tiles import num_valid_rows, store_transposed


def declare_dq(code: Code, panel: Panel, variant: Variant) -> None:
    """Declare the microkernels."""
    if variant.row_values:
        declare_row_values(code, variant.real_dtype, ACCUMULATOR_ROWS)
    else:
        declare_values(code, panel)


def accumulate_dq(kernel: Kernel, k: KeyBlock, count: Value, weights: Pointer) -> None:
    """Add a block's part, `weights @ k`."""
    code, w, panel, depth = kernel.code, kernel.w, kernel.panel, kernel.a.integer("head_dim")
    if kernel.variant.row_values:
        num_valid = num_valid_rows(code, panel, kernel.task, code.index(0))
        loop = functools.partial(accumulator_loop, code, num_valid)
        row_value_product(code, loop, weights, panel.rows, k, count, w.dq, depth, w.alpha)
    else:
        args = (weights, k.first, k.stride, count, w.dq, depth, w.alpha)
        kernel.with_narrow_panels(code.index(0), lambda panel: value_product(code, panel, *args))


def store_dq(kernel: Kernel, num_valid: Value) -> None:
    code, a, w, depth, dtype = kernel.code, kernel.a, kernel.w, kernel.a.integer("head_dim"), kernel.variant.real_dtype
    if kernel.variant.row_values:
        store_row_vectors(code, num_valid, w.dq, depth, dtype, a.pointer("dq"), w.dq_offsets)
    else:
        store_transposed(code, kernel.panel, w.dq, depth, dtype, a.pointer("dq"), w.dq_offsets, num_valid)
