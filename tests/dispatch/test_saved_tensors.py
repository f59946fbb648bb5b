"""Backward gets what forward saved, or an error: after hooks of saved tensors, and from callers of the operators."""

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import dense_call, everything, paged_call, varlen_call
from test_operators import arguments_of_backward
from torch import Tensor

import flashtile
from flashtile.dispatch.operators import OPERATORS
from flashtile.errors import ArgumentError

SAVED = ("out", "lse", "q", "k", "v")
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "another dtype": lambda x: x.bfloat16(),
    "integers": lambda x: x.to(torch.int8),
    "wider": lambda x: x.double(),
    "fewer features": lambda x: x[..., :-1],
    "no batch": lambda x: x[:0],
    "flat": lambda x: x.flatten(),
    "another device": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
}
CALLS = (dense_call(), dense_call(**everything()), varlen_call(), paged_call())


@pytest.mark.filterwarnings("ignore::flashtile.errors.AttentionWarning")  # `tiled` is slow on `meta`
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", [*SAVED, "all"])
def test_hooks_that_change_what_was_saved(which: str, change: str) -> None:
    for _ in range(4):  # planned, recorded, replayed, and repeated by its arguments
        q, k, v = (torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3))
        names = itertools.cycle(SAVED)

        def pack(x: Tensor, names: Any = names) -> Tensor:
            return CHANGES[change](x.detach()) if next(names) == which or which == "all" else x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = flashtile.attention(q, k, v)
        with pytest.raises((ArgumentError, RuntimeError)):  # the latter is autograd's, of integers
            out.sum().backward()


@pytest.mark.parametrize("change", sorted(CHANGES.keys() - {"another device"}))  # the formula of shapes runs on `meta`
@pytest.mark.parametrize("argument", range(1, 5))  # out, lse, dout, dlse
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.layout)
def test_results_that_do_not_fit(call: Any, argument: int, change: str) -> None:
    operator = OPERATORS["dense" if call.layout == "dense" else "varlen"].backward
    arguments = list(arguments_of_backward(call))
    arguments[argument] = CHANGES[change](arguments[argument])
    with pytest.raises(ArgumentError, match=f"`{('out', 'lse', 'dout', 'dlse')[argument - 1]}` is a tensor"):
        operator(*arguments)


def test_operators_with_random_mistakes() -> None:
    """Each ends with a result or an exception: a crash would end this process."""
    for seed in range(100):
        draw = random.Random(seed)
        call = draw.choice(CALLS)
        operators = OPERATORS["dense" if call.layout == "dense" else "varlen"]
        backward = draw.random() < 0.6
        arguments = list(arguments_of_backward(call) if backward else operators.arguments(call))
        places = [n for n, x in enumerate(arguments) if isinstance(x, Tensor)]
        for n in draw.sample(places, draw.randint(1, 2)):
            if (x := arguments[n]).dim() > 0:
                arguments[n] = draw.choice([*CHANGES.values()])(x)
        with contextlib.suppress(ArgumentError, IndexError, ValueError, RuntimeError):
            (operators.backward if backward else operators.forward)(*arguments)
