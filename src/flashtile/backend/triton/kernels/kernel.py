"""`@kernel`: a Triton kernel whose parameters are grouped in NamedTuples.

Triton 3.6 to 3.9 specialize each number in a tuple by its value, even if `do_not_specialize` names the tuple: every new
length would compile a new kernel. `kernel` therefore generates the kernel to launch. It takes all fields one by one,
groups them, and calls the function as written, which Triton inlines: the machine code is the same.
"""

import inspect
import linecache
from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl

Pointer = tl.pointer_type  # kernels are specialized by its alignment
Scalar = tl.tensor  # never specialized: a new length or stride uses the same compiled kernel


def kernel(function: Any) -> Any:
    """Make the kernel to launch.

    Its arguments have flat names. Of a parameter `q`, the field `data` is `q` and `stride_b` is `stride_q_b`; any other
    field has its own name.
    """
    name, parameters = function.__name__, inspect.signature(function).parameters.values()
    fields = [field for p in parameters for field in flatten(p.name, p.annotation)]
    pointers, scalars = ([x for x, kind in fields if kind is wanted] for wanted in (Pointer, Scalar))
    scalars.sort(key=lambda x: not x.startswith("stride_"))  # neighbors in constant memory are loaded in pairs
    constants = [f"{x}: tl.constexpr" for x, kind in fields if kind is tl.constexpr]
    body = ", ".join(constructor(p.name, p.annotation) for p in parameters)
    source = f"def {name}({', '.join(pointers + scalars + constants)}):\n    body({body})\n"
    names = {"__name__": function.__module__, "tl": tl, "body": triton.jit(function)}
    names |= {group.__name__: group for p in parameters for group in groups(p.annotation)}
    file = f"<{function.__module__}.{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # where Triton reads it
    exec(compile(source, file, "exec"), names)
    return triton.jit(names[name], do_not_specialize=scalars)


def is_group(kind: Any) -> bool:
    return hasattr(kind, "_fields")


def groups(kind: Any) -> Iterator[Any]:
    """A NamedTuple and those in its fields."""
    if is_group(kind):
        yield kind
        for field in kind._fields:
            yield from groups(kind.__annotations__[field])


def flatten(name: str, kind: Any) -> Iterator[tuple[str, Any]]:
    """The flat names of a parameter, each with its kind: Pointer, Scalar or `tl.constexpr`."""
    if not is_group(kind):
        yield name, kind
    else:
        for field in kind._fields:
            yield from flatten(flat_name(name, field), kind.__annotations__[field])


def flat_name(name: str, field: str) -> str:
    if field == "data":
        return name
    return field.replace("stride_", f"stride_{name}_") if field.startswith("stride_") else field


def constructor(name: str, kind: Any) -> str:
    """The expression that makes a parameter from its flat names."""
    if not is_group(kind):
        return name
    fields = (constructor(flat_name(name, field), kind.__annotations__[field]) for field in kind._fields)
    return f"{kind.__name__}({', '.join(fields)})"
