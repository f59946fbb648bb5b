"""Contexts of sharded calls belong to a thread and to the backward passes that it starts."""

import threading
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.call import sharding

REENTRANT = 70  # backward passes inside of each other, after 60 of which autograd takes another thread


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, seen: list[Any]) -> Tensor:
        ctx.depth, ctx.seen = depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        if ctx.depth == 0:
            ctx.seen += [threading.get_ident(), sharding.current()]
        else:
            with torch.enable_grad():
                Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.seen).sum().backward()
        return dx, None, None


def test_autograds_threads_have_the_context() -> None:
    seen: list[Any] = []
    out = Nested.apply(torch.ones(1, requires_grad=True), REENTRANT, seen)
    with sharding.inside("context"):
        out.sum().backward()
    assert seen[0] != threading.get_ident()
    assert seen[1] == "context"


def test_other_threads_and_other_calls_have_none() -> None:
    seen = []
    x = torch.randn(1, 1, 3, 4)
    with sharding.inside("context"), sharding.inside(None):
        flashtile.attention(x, x, x)
        with sharding.inside("inner"):
            thread = threading.Thread(target=lambda: seen.append(sharding.current()))
            thread.start()
            thread.join()
            assert sharding.current() == "inner"
        assert sharding.current() is None
        assert sharding.contexts_open
    assert seen == [None]
    assert not sharding.contexts_open


def test_names_and_defaults_of_a_call_without_positional_arguments() -> None:
    x = torch.randn(1, 1, 3, 4)
    assert torch.equal(flashtile.attention(q=x, k=x, v=x), flashtile.attention(x, x, x))
