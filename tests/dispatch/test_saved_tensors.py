"""Backward gets what forward saved, or an error: after hooks of saved tensors, and from callers of the operators."""

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import HQ, SK, dense_call, everything, paged_call, varlen_call
from test_operators import arguments_of_backward
from torch import Tensor

import flashtile
from flashtile.call.call import DIFFERENTIABLE
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


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
@pytest.mark.parametrize("call", CALLS[:1] + CALLS[2:], ids=lambda call: call.layout)
def test_gradients_of_what_is_absent(call: Any, backend: str) -> None:
    operator = OPERATORS["dense" if call.layout == "dense" else "varlen"].backward
    call = call._replace(settings=call.settings._replace(backend=backend))
    needs, *rest = arguments_of_backward(call)
    for n, name in enumerate(DIFFERENTIABLE[3:], 3):
        with pytest.raises(ArgumentError, match=rf"`{name}` is NoneType None.*\n.*needs\[{n}\] requests its gradient"):
            operator([*needs[:n], True, *needs[n + 1 :]], *rest)
    for wrong in (needs[:-1], [*needs, False]):
        with pytest.raises(ArgumentError, match=f"{len(needs)} bools, for q, k, v, bias, alibi_slopes, sinks"):
            operator(wrong, *rest)


def test_gradients_of_what_has_none() -> None:
    """Integers that a score_mod reads, and all that a mask reads."""
    shift = flashtile.ScoreMod(lambda s, b, h, i, j, x: s + x[h], (torch.arange(HQ),))
    late = flashtile.MaskMod(lambda b, h, i, j, x: i >= x[j], (torch.zeros(SK),))
    call = dense_call(score_mod=shift, mask=late)
    needs, *rest = arguments_of_backward(call, [True] * 3 + [False] * 5)
    for n, name in ((6, r"score_mod.tensors\[0\]"), (7, r"mask.tensors\[0\]")):
        with pytest.raises(ArgumentError, match=rf"`{name}` is a tensor.*\n.*needs\[{n}\]"):
            OPERATORS["dense"].backward([*needs[:n], True, *needs[n + 1 :]], *rest)


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_settings_of_absent_tensors(backend: str) -> None:
    for argument, settings, captured in (
        ("dropout_seed", {"dropout_p": 0.5}, ()),
        ("score_mod.tensors", {}, (torch.zeros(1),)),
        ("score_mod.tensors", {"num_mask_tensors": 1}, ()),
        ("mask.tensors", {"num_mask_tensors": 1}, (torch.zeros(1),)),
        ("score_mod.tensors", {"num_mask_tensors": -1}, ()),
    ):
        call = dense_call()
        tensors = call.tensors._replace(score_mod_tensors=captured)
        call = call._replace(tensors=tensors, settings=call.settings._replace(backend=backend, **settings))
        with pytest.raises(ArgumentError) as found:
            OPERATORS["dense"].forward(*OPERATORS["dense"].arguments(call))
        assert found.value.argument == argument


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
