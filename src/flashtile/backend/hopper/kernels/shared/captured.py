"""Kernels that take the tensors which a score_mod captures, of any number and dimensions.

Triton 3.6 to 3.9 specialize each number in a tuple by its value, so that a new length would compile a new kernel. The
kernel to launch is therefore generated: it takes all arguments one by one, groups those of the score_mod, and calls the
kernel as written, which the compiler inlines.
"""

import functools
import inspect
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....gpu.captured import captured_names
from ....gpu.generated import defined
from .compat import scalar_names
from .score_mod import PairInputs

ORIGIN = ("b0", "h0", "i0", "j0")


@functools.cache
def with_captured(kernel: Any, dimensions: tuple[int, ...]) -> Any:
    """The kernel with arguments for captured tensors with these numbers of dimensions, in place of `inputs`."""
    function = getattr(kernel, "fn", kernel)
    name = function.__name__
    captured, pointers = captured_names(dimensions)
    own = [x for x in inspect.signature(function).parameters if x not in ("inputs", "CONFIG")]
    inputs = f"PairInputs({', '.join(ORIGIN)}, ({''.join(f'{x}, ' for x in captured)}))"
    source = (
        f"def {name}({', '.join((*own, *ORIGIN, *captured))}, CONFIG: gl.constexpr):\n"
        f"    body({', '.join(own)}, CONFIG, {inputs})\n"
    )
    title = f"{function.__module__}.{name}{''.join(f' {n}' for n in dimensions)}"
    names = {"__name__": function.__module__, "gl": gl, "body": kernel, "PairInputs": PairInputs}
    generated = defined(name, source, title, names)
    scalars = [x for x in scalar_names(generated) if x not in pointers]
    of_triton = hasattr(kernel, "is_gluon") and not kernel.is_gluon()
    return (triton if of_triton else gluon).jit(generated, do_not_specialize=scalars)
