"""Calls with functions of scores and masks that a compiled program cannot contain: they run between its graphs.

A formula is traced from a function outside of Dynamo: `flashtile.ScoreMod` and `flashtile.MaskMod` have one. A bare
function, PyTorch's BlockMask, or a function that computes from whole tensors, gets its own in each call, so that the
call breaks the graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..block_mask import is_flex
from ..dynamo import untraced
from ..expression.modifier import Modifier

REASON = (
    "a bare function as score_mod or mask, PyTorch's BlockMask, or a function that computes from whole tensors that it "
    "finds, is no part of a graph. For a graph without breaks, make flashtile.ScoreMod(fn), flashtile.MaskMod(fn) or "
    "flashtile.BlockMask.of_flex(block_mask) outside of the compiled function, and pass that; what is computed from "
    "whole tensors is among its `tensors`"
)


def breaks_graph(*functions: Any) -> bool:
    """Whether Dynamo traces a call with such a function."""
    return torch.compiler.is_dynamo_compiling() and any(is_bare(x) for x in functions)


def is_bare(x: Any) -> bool:
    if isinstance(x, Modifier):
        return x.each_call
    return x is not None and not isinstance(x, Tensor) and (is_flex(x) or callable(x))


@untraced
def run_outside(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function between two graphs."""
    return function(*args, **kwargs)


run_outside._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]  # `fullgraph=True` raises with it
