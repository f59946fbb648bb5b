"""Kernels whose parameters are grouped in NamedTuples.

Triton 3.6 to 3.9 specialize each number in a tuple by its value, even if `do_not_specialize` names the tuple: every new
length would compile a new kernel. `kernel` therefore generates the kernel to launch. It takes all fields one by one,
groups them, and calls the function as written, which Triton inlines: the machine code is the same. The tensors that a
score_mod captures, of any number and dimensions, are more fields: `with_captured` generates the kernel that takes them.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from .compiled_once import compiled_once
from .generated import defined


class Language(NamedTuple):
    """What kernels are written in, Triton or Gluon: the decorator, and the types that annotate their parameters."""

    jit: Any
    pointer: Any  # a pointer, by whose alignment a kernel is specialized, or a TMA descriptor
    scalar: Any  # a number, never specialized: a new length or stride uses the same compiled kernel
    constexpr: Any


class Captured:
    """A tuple: data pointer, sizes and strides of each captured tensor, one after another. `None` without tensors."""


def kernel(function: Any, language: Language) -> Any:
    """Make the kernel to launch.

    Parameters and the fields of groups have one of the language's types, or are groups. The kernel's arguments have
    flat names. Of a parameter `q`, the field `data` is `q` and `stride_b` is `stride_q_b`; any other field has its own
    name. Fields of one name are one argument. Pointers and scalars may be `None`: absent, and compiled away.
    """
    return generated(language.jit(function), (), language)


@functools.cache
def with_captured(kernel: Any, dimensions: tuple[int, ...]) -> Any:
    """Make the kernel that also takes captured tensors with these numbers of dimensions: pointers `captured0` and so
    on, scalars `size_captured0_0` and `stride_captured0_0`.
    """
    names = function_of(kernel).__globals__
    return generated(names["body"], dimensions, names["language"]) if dimensions else kernel


def without(group: Any, *fields: str, **others: Any) -> Any:
    """A group for kernels that have no such `fields`: they are `None`, and no arguments. Those in `others` have another
    type.
    """
    kinds = {name: None if name in fields else group.__annotations__[name] for name in group._fields}
    return type(group.__name__, (group,), {"__annotations__": kinds | others})


def generated(body: Any, dimensions: tuple[int, ...], language: Language) -> Any:
    """The kernel to launch for a function under `jit`."""
    function = function_of(body)
    name, parameters = function.__name__, inspect.signature(function).parameters.values()
    fields: dict[str, Any] = {}
    for p in parameters:
        for field, kind in flatten(p.name, p.annotation, dimensions, language):
            if fields.setdefault(field, kind) is not kind or kind not in language[1:]:
                raise TypeError(f"{name}: {field} is neither pointer, scalar nor constant, or two of them")
    pointers, scalars, constants = ([x for x, kind in fields.items() if kind is wanted] for wanted in language[1:])
    scalars.sort(key=lambda x: not x.startswith("stride_"))  # neighbors in constant memory are loaded in pairs
    arguments = ", ".join(constructor(p.name, p.annotation, dimensions, language) for p in parameters)
    declared = ", ".join(pointers + scalars + [f"{x}: constexpr" for x in constants])
    source = f"def {name}({declared}):\n    body({arguments})\n"
    names = {"__name__": function.__module__, "body": body, "language": language, "constexpr": language.constexpr}
    names |= {group.__name__: group for p in parameters for group in groups(p.annotation)}
    captured = "".join(f" {n}" for n in dimensions)
    made = defined(name, source, f"{function.__module__}.{name}{captured}", names)
    return compiled_once(language.jit(made, do_not_specialize=scalars))


def function_of(kernel: Any) -> Any:
    """The Python function of a kernel."""
    return getattr(kernel, "fn", kernel)


def is_group(kind: Any) -> bool:
    return hasattr(kind, "_fields")


def groups(kind: Any) -> Iterator[Any]:
    """A NamedTuple and those in its fields."""
    if is_group(kind):
        group = tuple_of(kind)
        yield group
        for of_field in group.__annotations__.values():
            yield from groups(of_field)


def tuple_of(group: Any) -> Any:
    """The NamedTuple itself, of a group `without` some of its fields too."""
    return group if group.__base__ is tuple else group.__base__


def flatten(name: str, kind: Any, dimensions: tuple[int, ...], language: Language) -> Iterator[tuple[str, Any]]:
    """The flat names of a parameter, each with its kind."""
    if is_group(kind):
        for field, of_field in kind.__annotations__.items():
            yield from flatten(flat_name(name, field), of_field, dimensions, language)
    elif kind is Captured:
        for n, ndim in enumerate(dimensions):
            yield f"{name}{n}", language.pointer
            yield from ((f"{x}_{name}{n}_{dim}", language.scalar) for x in ("size", "stride") for dim in range(ndim))
    elif kind is not None:
        yield name, kind


def flat_name(name: str, field: str) -> str:
    if field == "data":
        return name
    return field.replace("stride_", f"stride_{name}_") if field.startswith("stride_") else field


def constructor(name: str, kind: Any, dimensions: tuple[int, ...], language: Language) -> str:
    """The expression that makes a parameter from its flat names."""
    if kind is Captured:
        names = [x for x, _ in flatten(name, kind, dimensions, language)]
        return f"({''.join(f'{x}, ' for x in names)})" if names else "None"
    if not is_group(kind):
        return name
    group, fields = tuple_of(kind), []
    for field, of_field in kind.__annotations__.items():
        if of_field is None:
            fields.append(absent(group.__annotations__[field]))
        else:
            fields.append(constructor(flat_name(name, field), of_field, dimensions, language))
    return f"{group.__name__}({', '.join(fields)})"


def absent(kind: Any) -> str:
    """The expression of an absent field: `None`, or a group of `None`."""
    if not is_group(kind):
        return "None"
    return f"{kind.__name__}({', '.join(map(absent, tuple_of(kind).__annotations__.values()))})"
