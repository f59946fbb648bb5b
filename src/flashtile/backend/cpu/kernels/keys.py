"""Blocks of keys and values, where they lie in memory or copied to the workspace."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..variant import Variant
from .codegen import Code
from .fields import Arguments
from .formats import STORAGE_TYPES, load, load_vector
from .operands import FLOAT, LONG, Pointer, Value
from .tiles import Task


class KeyBlock(NamedTuple):
    """The first row of a block of keys or values in memory, and the stride between rows."""

    first: Pointer
    stride: Value


def key_blocks(fields: Sequence[Any]) -> list[KeyBlock]:
    """Blocks from their fields in a row, as functions get them."""
    return [KeyBlock(*fields[n : n + 2]) for n in range(0, len(fields), 2)]


def key_offsets(code: Code, a: Arguments, task: Task, side: str) -> Callable[[Value], Value]:
    """The offset of a row of k, v or their tangents (`side`), in elements, by its number."""
    table, page_size, step = a.pointer("page_table", LONG), a.integer("page_size"), a.integer(f"{side}_s")
    head_offset = task.kv_head * a.integer(f"{side}_h")

    def offset(j: Value) -> Value:
        at = code.variable(task.b * a.integer(f"{side}_b") + head_offset + (task.k_first + j) * step)
        with code.if_then(table.is_null().equals(0)):
            page = table[task.b * a.integer("page_columns") + j // page_size]
            at.set(page * a.integer(f"{side}_b") + head_offset + j % page_size * step)
        return at.get()

    return offset


def load_keys(
    code: Code,
    a: Arguments,
    variant: Variant,
    task: Task,
    side: str,
    first: Value,
    last: Value,
    scratch: Pointer,
    dtype: str | None = None,
) -> KeyBlock:
    """Rows `first` to `last`, exclusive, of k, v or their tangents (`side`), in `dtype` or else as reals. No copy is
    made if they have that dtype and one stride; otherwise, as at the border of two pages, they are copied to `scratch`.
    """
    target_dtype = variant.real_dtype if dtype is None else dtype
    kind = STORAGE_TYPES[target_dtype]
    source, table = a.pointer(side, kind), a.pointer("page_table", LONG)
    page_size, step = a.integer("page_size"), a.integer(f"{side}_s")
    width = a.integer("head_dim" if side in ("k", "dk", "tk") else "head_dim_v")
    offset, scratch = key_offsets(code, a, task, side), scratch.cast(kind)

    def copy() -> None:
        full = width // code.lanes * code.lanes
        with code.loop(first, last) as j:
            at, to = offset(j), scratch + (j - first) * width
            with code.loop(0, full, code.lanes) as d:
                x = (
                    source.vector(at + d)
                    if target_dtype == variant.key_dtype
                    else load_vector(code, source, at + d, variant.key_dtype)
                )
                to.store(x, d)
            with code.loop(full, width) as d:
                same = target_dtype == variant.key_dtype
                to[d] = source[at + d] if same else load(code, source, at + d, variant.key_dtype)

    if target_dtype != variant.key_dtype:
        copy()
        return KeyBlock(scratch, width)
    address, row_stride = code.variable(Value(code, scratch.ir)), code.variable(width)
    contiguous = table.is_null() | (first // page_size).equals((last - 1) // page_size)
    with code.if_else(contiguous) as (then, otherwise):
        with then:
            address.set(Value(code, (source + offset(first)).ir))
            row_stride.set(step)
        with otherwise:
            copy()
    return KeyBlock(code.pointer(address.get(), kind), row_stride.get())


def head_scale(code: Code, a: Arguments, task: Task, side: str) -> Value:
    """The scale of a task's head of keys or values of 8 bits."""
    at = task.b * a.integer(f"{side}_descale_b") + task.kv_head * a.integer(f"{side}_descale_h")
    return code.convert(a.pointer(f"{side}_descale", FLOAT)[at], code.real_type)


def load_scales(code: Code, a: Arguments, task: Task, side: str, first: Value, last: Value, to: Pointer) -> None:
    """Copy the scales of keys `first` to `last`, exclusive, of a block; `to` has a place for each key of the block."""
    source, name = a.pointer(f"{side}_descale", FLOAT), f"{side}_descale"
    table, page_size = a.pointer("page_table", LONG) + task.b * a.integer("page_columns"), a.integer("page_size")
    of_head = source + task.b * a.integer(f"{name}_b") + task.kv_head * a.integer(f"{name}_h")
    column, slot = code.variable(first // page_size), code.variable(first % page_size)
    with code.loop(first, last) as j:
        at = table[column.get()] * a.integer(f"{name}_p") + slot.get() * a.integer(f"{name}_n")
        to[j - first] = code.convert(of_head[at], code.real_type)
        ends = (slot.get() + 1).equals(page_size)
        column.set(column.get() + code.select(ends, code.index(1), 0))
        slot.set(code.select(ends, code.index(0), slot.get() + 1))
