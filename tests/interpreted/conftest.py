"""Triton's interpreter without its repeated and unused work, which takes two thirds of its time."""

import dataclasses
import functools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest import mock

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    with ExitStack() as patches:
        for patch in (
            *patches_of_the_language(interpreter),
            *shapes_of_values(),
            *types_of_operands(),
            operands_of_known_types(),
            overflow_check(interpreter),
            numpy_dtypes(interpreter),
            products(interpreter),
            grid_controls(interpreter),
        ):
            patches.enter_context(patch)
        yield


def patches_of_the_language(interpreter: ModuleType) -> tuple[Any, Any]:
    """Patch `triton.language` once a launch. The interpreter repeats that at each call of a device function."""
    from triton import language as tl

    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[tuple[ModuleType, ...]] = set()

    @functools.cache
    def modules_of(fn: Any) -> tuple[ModuleType, ...]:
        return tuple(x for x in fn.__globals__.values() if isinstance(x, ModuleType) and x in (tl, tl.core))

    def patch_once(fn: Any) -> Any:
        modules = modules_of(fn)
        if modules in patched:
            return interpreter._LangPatchScope()
        patched.add(modules)
        return patch_language(fn)

    def launch_unpatched(*args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(*args, **kwargs)

    return (
        mock.patch.object(interpreter, "_patch_lang", patch_once),
        mock.patch.object(interpreter.GridExecutor, "__call__", launch_unpatched),
    )


def shapes_of_values() -> tuple[Any, Any]:
    """Cache what a type or a value has by its shape. Triton checks and wraps the shape again for each value."""
    from triton.language import core

    checked_type, wrapped_value = core.block_type.__init__, core.tensor.__init__
    of_types: dict[Any, dict[str, Any]] = {}
    of_values: dict[str, dict[str, Any]] = {}

    def new_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(x.value if isinstance(x, core.constexpr) else x for x in shape))
        if key not in of_types:
            checked_type(self, element_ty, shape)
            of_types[key] = vars(self).copy()
        vars(self).update(of_types[key], element_ty=element_ty)

    def new_value(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        if type.name not in of_values:
            wrapped_value(self, handle, type)
            of_values[type.name] = vars(self).copy()
        vars(self).update(of_values[type.name], handle=handle, type=type, dtype=type.scalar)

    return mock.patch.object(core.block_type, "__init__", new_type), mock.patch.object(
        core.tensor, "__init__", new_value
    )


def types_of_operands() -> tuple[Any, Any, Any]:
    """Compare types by identity, shape and name. Triton unwraps both types and their shapes for each operation."""
    from triton.language import core, semantic

    functions = semantic.TritonSemantic
    same, broadcast, combine = core.dtype.__eq__, functions.broadcast_impl_value, functions.computation_type_impl
    combined: dict[tuple[Any, ...], Any] = {}

    def is_same(self: Any, other: Any) -> bool:
        return self is other or same(self, other)

    def broadcast_once(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() == rhs.type.is_block() and lhs.handle.data.shape == rhs.handle.data.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def combine_once(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in combined:
            combined[key] = combine(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return combined[key]

    return (
        mock.patch.object(core.dtype, "__eq__", is_same),
        mock.patch.object(functions, "broadcast_impl_value", broadcast_once),
        mock.patch.object(functions, "computation_type_impl", combine_once),
    )


def operands_of_known_types() -> Any:
    """Remember which types operands keep, and numbers as tensors. Triton casts and broadcasts for each operation."""
    from triton.language import core, semantic

    check = semantic.TritonSemantic.binary_op_type_checking_impl
    kept: set[tuple[Any, ...]] = set()
    constants: dict[tuple[Any, ...], Any] = {}

    def check_once(self: Any, lhs: Any, rhs: Any, *options: bool, **named: bool) -> tuple[Any, Any]:
        operands = lhs, rhs
        key = (*map(key_of, operands), options, *named.items())
        if key in kept:
            return operands
        if key in constants:
            return tuple(x if isinstance(x, core.tensor) else constants[key] for x in operands)
        found = check(self, lhs, rhs, *options, **named)
        same = [x is y for x, y in zip(found, operands, strict=True)]
        if all(same):
            kept.add(key)
        elif any(same) and not all(isinstance(x, core.tensor) for x in operands):
            constants[key] = found[same.index(False)]
        return found

    def key_of(x: Any) -> Any:
        return x.type.name if isinstance(x, core.tensor) else (type(x), repr(x))  # -0.0 is not 0.0, nor 1 True

    return mock.patch.object(semantic.TritonSemantic, "binary_op_type_checking_impl", check_once)


def overflow_check(interpreter: ModuleType) -> Any:
    """Drop the check of integer sums and products. Without `debug` the interpreter computes it and ignores the result:
    half of the time of all kernels.
    """
    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    return mock.patch.object(builder, "options", options)


def numpy_dtypes(interpreter: ModuleType) -> Any:
    """Cache NumPy's dtypes. The interpreter makes a table of all of them at each use."""
    numpy_dtype, cached = interpreter._get_np_dtype, {}

    def once(dtype: Any) -> Any:
        if dtype.name not in cached:
            cached[dtype.name] = numpy_dtype(dtype)
        return cached[dtype.name]

    return mock.patch.object(interpreter, "_get_np_dtype", once)


def grid_controls(interpreter: ModuleType) -> Any:
    """Let kernels follow each other: each launch is complete before the next one begins."""

    class Results:
        def __init__(self, handle: Any):
            self.handle = handle

        def get_result(self, _: int) -> Any:
            return self.handle

    def assembly(self: Any, text: str, constraints: str, values: Any, *_: Any) -> Any:
        assert text.startswith("griddepcontrol."), text
        return Results(values[0])

    return mock.patch.object(interpreter.InterpreterBuilder, "create_inline_asm", assembly)


def products(interpreter: ModuleType) -> Any:
    """Multiply bfloat16 numbers. The interpreter (Triton 3.6 to 3.9) multiplies their bits, as integers."""
    import numpy as np
    from triton import language as tl

    def values(x: Any) -> Any:
        if x.dtype != tl.bfloat16:
            return x.data
        return (x.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        a, b = (interpreter.TensorHandle(values(x), tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
        return multiply(builder, a, b, d, *options)

    multiply = interpreter.InterpreterBuilder.create_dot
    return mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot)
