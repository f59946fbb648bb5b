"""Repeated calls on a GPU: `pytest -m gpu tests/api/test_repeated_gpu.py`."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.dispatch import fast_path

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
ROUNDS = 20


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    fast_path.forget()
    yield
    fast_path.forget()


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(2, 8, 2000, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(4)]


def results(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    out = flashtile.attention(q, k, v, causal=True, deterministic=True)
    return out, *torch.autograd.grad(out, (q, k, v), dout)


def assert_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


def test_streams() -> None:
    """Calls of several streams at once share a recording, but neither memory nor semaphores."""
    sets = [inputs() for _ in range(4)]
    expected = [results(*one) for one in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        found = []
        for stream, one in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                found.append(results(*one))
        torch.cuda.synchronize()
        for a, b in zip(found, expected, strict=True):
            assert_equal(a, b)


def test_a_captured_call_between_eager_ones() -> None:
    captured, eager = inputs(), inputs()
    expected = results(*eager)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            results(*captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = results(*captured)
    for _ in range(ROUNDS):
        with torch.no_grad():
            for x in captured:
                x.normal_()
        graph.replay()
        assert_equal(results(*eager), expected)
        torch.cuda.synchronize()
        assert_equal(replayed, results(*captured))


def test_autocast_is_part_of_a_call() -> None:
    q, k, v, dout = inputs(torch.float32)
    for _ in range(3):
        exact = results(q, k, v, dout)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = flashtile.attention(q, k, v, causal=True, deterministic=True)
            gradients = torch.autograd.grad(out, (q, k, v), dout.bfloat16())
        assert out.dtype is torch.bfloat16
        cast = results(*(x.bfloat16().detach().requires_grad_() for x in (q, k, v, dout)))
        assert_equal((out, *gradients), (cast[0], *(x.float() for x in cast[1:])))
        assert exact[0].dtype is torch.float32


MADE: dict[str, Callable[[], dict[str, Any]]] = {
    "seed": lambda: {"dropout_p": 0.2, "dropout_seed": 7},
    "drawn seed": lambda: {"dropout_p": 0.2},
    "bare function": lambda: {"score_mod": lambda score, b, h, i, j: score + 0.01 * (j - i)},
    "mask and score_mod": lambda: {
        "mask": flashtile.mask_mods.document(torch.arange(2000, device="cuda") // 300),
        "score_mod": flashtile.score_mods.alibi(torch.rand(8, device="cuda", generator=torch.Generator("cuda"))),
    },
    "slopes in float64": lambda: {"alibi_slopes": torch.linspace(0, 1, 8, device="cuda").double()},
}


@pytest.mark.parametrize("name", MADE)
def test_inputs_that_are_no_arguments(name: str) -> None:
    """Each call makes its own, with the results that it has without the fast path."""
    for _ in range(5):
        *tensors, dout = inputs()
        options, found = MADE[name]() | {"deterministic": True}, []
        state = torch.cuda.get_rng_state()
        for enabled in (True, False):
            torch.cuda.set_rng_state(state)
            with mock.patch.object(fast_path, "enabled", enabled):
                out = flashtile.attention(*tensors, **options)
                found.append((out, *torch.autograd.grad(out, tensors, dout)))
        assert_equal(*found)
