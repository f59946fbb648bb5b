"""Formulas of the operators for `torch.utils.flop_counter`. They count every pair, as PyTorch's do for its attention.

Its import loads Triton, so the formulas are registered when a program imports it.
"""

import functools
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..call.cache import CacheCall
from ..call.cache_tensors import appended, count, held
from ..call.call import Call, Needs
from . import cache_operator
from .operators import OPERATORS, Operators

COUNTER = "torch.utils.flop_counter"


def num_pairs(call: Call) -> int:
    """Pairs of a row and a key over all heads, whether or not they are visible."""
    t, settings = call.tensors, call.settings
    heads: int = t.q.shape[1]
    if t.cu_seqlens_q is None:
        return heads * summed(t.q.shape[2], t.k.shape[2], t.q.shape[0])
    room = t.k.shape[0] if t.page_table is None else t.page_table.shape[1] * t.k.shape[1]
    rows = lengths(t.cu_seqlens_q, t.seqused_q, settings.max_seqlen_q or t.q.shape[0])
    keys = lengths(t.cu_seqlens_k, t.seqused_k, settings.max_seqlen_k or room)
    return heads * summed(rows, keys, t.cu_seqlens_q.shape[0] - 1)


def num_cache_pairs(call: CacheCall) -> int:
    """The same with the keys that each sequence has after the call."""
    t, cache = call.tensors, call.cache
    heads: int = t.q.shape[1]
    if readable(cache.cache_seqlens):
        rows, keys = count(t.q, t.cu_seqlens_q), held(cache) + appended(cache, t)
    else:
        rows = t.q.shape[2] if t.cu_seqlens_q is None else t.q.shape[0]
        paged = cache.page_table
        keys = cache.k_cache.shape[2] if paged is None else paged.shape[1] * cache.k_cache.shape[1]
    return heads * summed(rows, keys, cache.cache_seqlens.shape[0])


def readable(x: Tensor) -> bool:
    """Whether it has values: tensors of traced programs have none."""
    return type(x) is Tensor and x.device.type != "meta"


def lengths(offsets: Tensor | None, used: Tensor | None, longest: int) -> Tensor | int:
    """Tokens of each sequence, or the most that it can have where no values can be read."""
    if used is not None:
        return used if readable(used) else longest
    return offsets.diff() if offsets is not None and readable(offsets) else longest


def summed(rows: Tensor | int, keys: Tensor | int, batch: int) -> int:
    pairs = rows * keys
    return int(pairs.sum()) if isinstance(pairs, Tensor) else batch * pairs


def of_forward(operators: Operators, *arguments: Any, out_val: Any = None) -> int:
    from ..iomodel import forward_flops  # here and below: not needed by `import flashtile`

    call = operators.call(arguments)
    return forward_flops(num_pairs(call), call.tensors.q.shape[-1], call.tensors.v.shape[-1])


def of_backward(operators: Operators, *arguments: Any, out_val: Any = None) -> int:
    from ..iomodel import backward_flops

    call = operators.call(arguments[-len(operators.fields) :])
    return backward_flops(num_pairs(call), call.tensors.q.shape[-1], call.tensors.v.shape[-1])


def of_tangents(operators: Operators, moves: Sequence[bool], _: Any, *arguments: Any, out_val: Any = None) -> int:
    from ..iomodel import tangent_flops

    call, needs = operators.call(arguments), Needs.from_flat(moves)
    products = needs.q + needs.k, needs.changes_scores + needs.v
    return tangent_flops(num_pairs(call), call.tensors.q.shape[-1], call.tensors.v.shape[-1], *products)


def of_second(operators: Operators, *arguments: Any, out_val: Any = None) -> int:
    from ..iomodel import second_flops

    call = operators.call(arguments[-len(operators.fields) :])
    return second_flops(num_pairs(call), call.tensors.q.shape[-1], call.tensors.v.shape[-1])


def of_cache(*arguments: Any, out_val: Any = None) -> int:
    from ..iomodel import forward_flops

    call = cache_operator.call_of(*arguments)
    return forward_flops(num_cache_pairs(call), call.tensors.q.shape[-1], call.cache.v_cache.shape[-1])


def register(counter: ModuleType) -> None:
    ops = torch.ops.flashtile
    for operators in OPERATORS.values():
        formulas = {"forward": of_forward, "backward": of_backward, "tangents": of_tangents, "second": of_second}
        for pass_, formula in formulas.items():
            op = getattr(ops, f"{operators.name}_{pass_}")
            counter.register_flop_formula(op, get_raw=True)(functools.partial(formula, operators))
    counter.register_flop_formula(getattr(ops, cache_operator.NAME), get_raw=True)(of_cache)


class Watcher(MetaPathFinder):
    """Finder that registers the formulas at the end of the counter's import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == COUNTER else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if COUNTER in sys.modules:
    register(sys.modules[COUNTER])
else:
    sys.meta_path.insert(0, Watcher())
