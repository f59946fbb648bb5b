"""Activation functions of torch.nn.functional that a traced function may call."""

import math
from typing import Any

from .functions import UntraceableError, special, square
from .program import BOOL, REAL


@special("relu")
def relu(tracer: Any, x: Any, inplace: bool = False) -> Any:
    b, node = tracer.builder, tracer.node(x)
    if inplace:
        raise UntraceableError("`relu` with the argument `inplace`")
    if node.kind == BOOL:
        raise UntraceableError("`relu` of a condition")
    return tracer.proxy(b.op("where", b.op("le", node, b.constant(0)), b.constant(0), node))  # NaN stays


@special("gelu")
def gelu(tracer: Any, x: Any, approximate: str = "none") -> Any:
    b, node = tracer.builder, tracer.node(x)
    if node.kind != REAL:
        raise UntraceableError("`gelu` of what is no real number")
    if approximate == "tanh":
        cubic = b.op("add", node, b.op("mul", b.constant(0.044715), b.op("mul", square(b, node), node)))
        part = b.op("tanh", b.op("mul", b.constant(math.sqrt(2 / math.pi)), cubic))
    else:
        part = b.op("erf", b.op("mul", node, b.constant(math.sqrt(0.5))))
    return tracer.proxy(b.op("mul", b.op("mul", node, b.constant(0.5)), b.op("add", part, b.constant(1.0))))


@special("silu")
def silu(tracer: Any, x: Any, inplace: bool = False) -> Any:
    b, node = tracer.builder, tracer.node(x)
    if node.kind != REAL:
        raise UntraceableError("`silu` of what is no real number")
    if inplace:
        raise UntraceableError("`silu` with the argument `inplace`")
    return tracer.proxy(b.op("mul", node, b.op("sigmoid", node)))
