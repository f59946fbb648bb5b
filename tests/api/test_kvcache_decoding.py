"""attention_with_kvcache: steps of decoding, planned and compiled once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cached import (
    CACHES,
    NAN,
    Arguments,
    angles,
    call_in_place,
    problem,
    turned,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import flashtile


def decode_inputs(steps: int) -> tuple[Tensor, Tensor, Tensor, Arguments]:
    """q, k and v of a whole sequence, and rotary tables; two query heads on one of k and v."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, steps, 4, generator=generator) for heads in (2, 1, 1))
    cos, sin = angles(steps, 4)
    return q, k, v, {"causal": True, "rotary_cos": cos, "rotary_sin": sin}


def decode(step: Callable[..., Any], count: int, page_size: int | None) -> Tensor:
    """One token at a time through `step`; the output of every step, `[B, H, S, D]`."""
    q, k, v, features = decode_inputs(count)
    lengths, slots = torch.zeros(2, dtype=torch.int32), count + 3
    shape = (2, 1, slots, 4) if page_size is None else (2 * -(-slots // page_size), page_size, 1, 4)
    caches = {name: torch.full(shape, NAN) for name in CACHES}
    if page_size is not None:
        features["page_table"] = torch.randperm(shape[0]).int().reshape(2, -1)
    outs = []
    for n in range(count):
        now = slice(n, n + 1)
        outs.append(step(q=q[:, :, now], k=k[:, :, now], v=v[:, :, now], cache_seqlens=lengths, **caches, **features))
        lengths += 1
    return torch.cat(outs, dim=2)


def prefill(count: int) -> Tensor:
    q, k, v, features = decode_inputs(count)
    caches = {name: torch.full((2, 1, count, 4), NAN) for name in CACHES}
    lengths = torch.zeros(2, dtype=torch.int32)
    return call_in_place({"q": q, "k": k, "v": v, "cache_seqlens": lengths} | caches | features)


@pytest.mark.parametrize(("page_size", "steps"), [(16, 1000), (None, 100)])
def test_a_thousand_steps_plan_once(page_size: int | None, steps: int) -> None:
    """And give what one prefill gives; a dense cache is one with long pages."""
    flashtile.dispatch.fast_path.forget()
    outs = decode(flashtile.attention_with_kvcache, steps, page_size)
    assert flashtile.dispatch.planner._plan.cache_info().misses == 1
    torch.testing.assert_close(outs, prefill(steps))


def test_prefill_is_causal_self_attention() -> None:
    """The same from `attention`, on q and k turned by hand."""
    q, k, v, features = decode_inputs(40)
    positions = torch.arange(40)
    q, k = (
        torch.stack([turned(one.transpose(0, 1), positions, features).transpose(0, 1) for one in x]) for x in (q, k)
    )
    torch.testing.assert_close(prefill(40), flashtile.attention(q, k, v, causal=True))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("page_size", [None, 16])
def test_compiled_steps_compile_once(page_size: int | None) -> None:
    counter = CompileCounter()
    step = torch.compile(lambda **x: flashtile.attention_with_kvcache(**x), fullgraph=True, backend=counter)
    outs = decode(step, 70, page_size)
    assert counter.frame_count == 1
    torch.testing.assert_close(outs, prefill(70))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_graph_sees_the_caches_change(backend: str) -> None:
    """Reads before the call see old values, reads after it new ones, and the caller's tensors are written."""
    arguments = problem(causal=True)
    for name in CACHES:
        arguments[name] = arguments[name].nan_to_num(nan=0.5)

    def step(k_cache: Tensor, v_cache: Tensor, **others: Any) -> tuple[Tensor, ...]:
        before = k_cache.sum() + v_cache.square().sum()
        out = flashtile.attention_with_kvcache(others.pop("q") * 2, k_cache, v_cache, **others)
        k_cache[0, 0, 0] += 1
        return out + 1, before, k_cache.sum() + v_cache.square().sum()

    expected, found = ({name: arguments[name].clone() for name in CACHES} for _ in range(2))
    eager = step(**arguments | expected)
    compiled = torch.compile(step, fullgraph=True, backend=backend)(**arguments | found)
    torch.testing.assert_close(compiled, eager)
    assert all(torch.equal(found[name], expected[name]) for name in CACHES)
    assert not torch.equal(found["k_cache"], arguments["k_cache"])
