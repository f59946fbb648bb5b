"""Triton's interpreter without its repeated and unused work, which takes two thirds of its time."""

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest

OF_A_COMPILER = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    with ExitStack() as patches:
        for patch in (
            *patches_of_the_language(interpreter),
            *calls_of_the_language(interpreter),
            *shapes_of_values(),
            *types_of_operands(),
            *binary_operations(interpreter),
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

    def launch_unpatched(grid: Any, *args: Any, **kwargs: Any) -> Any:
        """Compiled kernels refuse arguments that they do not have; the interpreter drops them."""
        patched.clear()
        unknown = set(kwargs) - {*grid.arg_names, *OF_A_COMPILER}
        assert not unknown, f"{grid.fn.__name__} has no {unknown}"
        return launch(grid, *args, **kwargs)

    return (
        mock.patch.object(interpreter, "_patch_lang", patch_once),
        mock.patch.object(interpreter.GridExecutor, "__call__", launch_unpatched),
    )


def calls_of_the_language(interpreter: ModuleType) -> tuple[Any, Any]:
    """Call builtins directly. The interpreter copies the arguments and checks them for each call."""
    from triton.language import core

    unwrap, others = core._unwrap_if_constexpr, {core.tensor, core.dtype, int, float, bool, type(None)}

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*args, **named)

        scope.set_attr(owner, name, call)

    def unwrap_once(x: Any) -> Any:
        return x if type(x) in others else unwrap(x)

    return (
        mock.patch.object(interpreter, "_patch_attr", patch_attribute),
        mock.patch.object(core, "_unwrap_if_constexpr", unwrap_once),
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


def binary_operations(interpreter: ModuleType) -> list[Any]:
    """Remember the one NumPy call that an operation on two types comes to. Triton finds it anew, with casts and
    broadcasts of their own, for each operation.
    """
    from triton.language import core, semantic

    builder, functions = interpreter.InterpreterBuilder, semantic.TritonSemantic
    binary_op, create_addptr = builder.binary_op, builder.create_addptr
    calls: list[tuple[Any, Any, Any]] = []  # of NumPy, in the operation that runs now

    def recorded_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        calls.append((op, lhs.data.dtype, rhs.data.dtype))
        return binary_op(self, lhs, rhs, op)

    def recorded_addptr(self: Any, pointers: Any, offsets: Any) -> Any:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        calls.append((lambda x, n: x + size * n.astype("uint64"), pointers.data.dtype, offsets.data.dtype))
        return create_addptr(self, pointers, offsets)

    def remembered(operation: Any) -> Any:
        recipes: dict[Any, Recipe | None] = {}

        def quick(self: Any, lhs: Any, rhs: Any, *options: Any) -> Any:
            key = (key_of(lhs), key_of(rhs), *options)
            recipe = recipes.get(key)
            if recipe is not None:
                return recipe(lhs, rhs)
            calls.clear()
            result = operation(self, lhs, rhs, *options)
            if key not in recipes:
                recipes[key] = Recipe.of(calls, lhs, rhs, result)
            return result

        return quick

    def key_of(x: Any) -> Any:
        if isinstance(x, core.tensor):
            return x.type.name, x.handle.dtype.name, x.handle.data.dtype.num  # three types, not always the same
        return type(x), repr(x)  # -0.0 is not 0.0, nor 1 True

    names = "add sub mul truediv and_ or_ xor_ shl lshr ashr minimum maximum"
    comparisons = "greater_than greater_equal less_than less_equal equal not_equal"
    return [
        mock.patch.multiple(builder, binary_op=recorded_op, create_addptr=recorded_addptr),
        *(
            mock.patch.object(functions, name, remembered(getattr(functions, name)))
            for name in (*names.split(), *comparisons.split())
        ),
    ]


class Recipe:
    """A NumPy call in place of an operation: its operands' dtypes, and what its result has besides data."""

    def __init__(self, call: tuple[Any, Any, Any], lhs: Any, rhs: Any, result: Any):
        self.function, *self.dtypes = call
        pairs = zip((lhs, rhs), self.dtypes, strict=True)
        self.constants = [None if hasattr(x, "handle") else np.array([x], dtype) for x, dtype in pairs]
        self.value = {name: x for name, x in vars(result).items() if name != "handle"}
        self.result, self.handle, self.dtype = type(result), type(result.handle), result.handle.dtype

    @classmethod
    def of(cls, calls: Sequence[tuple[Any, Any, Any]], lhs: Any, rhs: Any, result: Any) -> "Recipe | None":
        """`None` unless one call gives the same result."""
        operands = [x for x in (lhs, rhs) if hasattr(x, "handle")]
        plain = all(x.type.scalar.name in PLAIN or x.type.scalar.is_ptr() for x in operands)
        plain &= all(isinstance(x, int | float) for x in (lhs, rhs) if not hasattr(x, "handle"))
        if len(calls) != 1 or not plain or not right_for_bits(*calls[0]):
            return None
        recipe = cls(calls[0], lhs, rhs, result)
        data, expected = recipe(lhs, rhs).handle.data, result.handle.data
        same = data.dtype == expected.dtype and data.shape == expected.shape and data.tobytes() == expected.tobytes()
        return recipe if same else None

    def __call__(self, lhs: Any, rhs: Any) -> Any:
        (a, b), (a_dtype, b_dtype) = self.constants, self.dtypes
        if a is None:
            a = lhs.handle.data
            if a.dtype is not a_dtype:
                a = a.astype(a_dtype)
        if b is None:
            b = rhs.handle.data
            if b.dtype is not b_dtype:
                b = b.astype(b_dtype)
        handle, result = object.__new__(self.handle), object.__new__(self.result)
        handle.data, handle.dtype, handle.attr = self.function(a, b), self.dtype, {}
        vars(result).update(self.value, handle=handle)
        return result


def right_for_bits(function: Any, *dtypes: Any) -> bool:
    """NumPy's sums of truth values are not those of integers of one bit, its bitwise operations are."""
    return dtypes != (np.bool_, np.bool_) or function in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


PLAIN = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)} | {"int1", "fp16", "fp32", "fp64"}


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
