"""`@kernel`: a Triton kernel whose parameters are grouped in NamedTuples.

Triton 3.6 to 3.9 specialize each number in a tuple by its value, even if `do_not_specialize` names the tuple: every new
length would compile a new kernel. `kernel` therefore generates the kernel to launch. It takes all fields one by one,
groups them, and calls the function as written, which Triton inlines: the machine code is the same. The tensors that a
score_mod captures, of any number and dimensions, are more fields: `with_captured` generates the kernel that takes them.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon._runtime import GluonJITFunction

from ...gpu.generated import defined

Pointer = tl.pointer_type  # kernels are specialized by its alignment
Scalar = tl.tensor  # never specialized: a new length or stride uses the same compiled kernel


class Captured:
    """A tuple: data pointer, sizes and strides of each captured tensor, one after another. `None` without tensors."""


def gluon_kernel(function: Any) -> Any:
    """As `kernel`, of a function in Gluon."""
    return generated(gluon.jit(function), (), gluon.jit)


def kernel(function: Any) -> Any:
    """Make the kernel to launch.

    Its arguments have flat names. Of a parameter `q`, the field `data` is `q` and `stride_b` is `stride_q_b`; any other
    field has its own name.
    """
    return generated(triton.jit(function), ())


@functools.cache
def with_captured(kernel: Any, dimensions: tuple[int, ...]) -> Any:
    """Make the kernel that also takes captured tensors with these numbers of dimensions: pointers `captured0` and so
    on, scalars `size_captured0_0` and `stride_captured0_0`.
    """
    if not dimensions:
        return kernel
    jit = gluon.jit if isinstance(kernel, GluonJITFunction) else triton.jit
    return generated(kernel.fn.__globals__["body"], dimensions, jit)


def generated(body: Any, dimensions: tuple[int, ...], jit: Any = triton.jit) -> Any:
    """The kernel to launch for a function under `triton.jit`."""
    function = body.fn
    name, parameters = function.__name__, inspect.signature(function).parameters.values()
    fields = [field for p in parameters for field in flatten(p.name, p.annotation, dimensions)]
    pointers, scalars = ([x for x, kind in fields if kind is wanted] for wanted in (Pointer, Scalar))
    scalars.sort(key=lambda x: not x.startswith("stride_"))  # neighbors in constant memory are loaded in pairs
    constants = [f"{x}: tl.constexpr" for x, kind in fields if kind is tl.constexpr]
    arguments = ", ".join(constructor(p.name, p.annotation, dimensions) for p in parameters)
    source = f"def {name}({', '.join(pointers + scalars + constants)}):\n    body({arguments})\n"
    names = {"__name__": function.__module__, "tl": tl, "body": body}
    names |= {group.__name__: group for p in parameters for group in groups(p.annotation)}
    captured = "".join(f" {n}" for n in dimensions)
    return jit(defined(name, source, f"{function.__module__}.{name}{captured}", names), do_not_specialize=scalars)


def is_group(kind: Any) -> bool:
    return hasattr(kind, "_fields")


def groups(kind: Any) -> Iterator[Any]:
    """A NamedTuple and those in its fields."""
    if is_group(kind):
        yield kind
        for field in kind._fields:
            yield from groups(kind.__annotations__[field])


def flatten(name: str, kind: Any, dimensions: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """The flat names of a parameter, each with its kind: Pointer, Scalar or `tl.constexpr`."""
    if is_group(kind):
        for field in kind._fields:
            yield from flatten(flat_name(name, field), kind.__annotations__[field], dimensions)
    elif kind is Captured:
        for n, ndim in enumerate(dimensions):
            yield f"{name}{n}", Pointer
            yield from ((f"{x}_{name}{n}_{dim}", Scalar) for x in ("size", "stride") for dim in range(ndim))
    else:
        yield name, kind


def flat_name(name: str, field: str) -> str:
    if field == "data":
        return name
    return field.replace("stride_", f"stride_{name}_") if field.startswith("stride_") else field


def constructor(name: str, kind: Any, dimensions: tuple[int, ...]) -> str:
    """The expression that makes a parameter from its flat names."""
    if kind is Captured:
        return f"({''.join(f'{x}, ' for x, _ in flatten(name, kind, dimensions))})" if dimensions else "None"
    if not is_group(kind):
        return name
    fields = (constructor(flat_name(name, field), kind.__annotations__[field], dimensions) for field in kind._fields)
    return f"{kind.__name__}({', '.join(fields)})"
