"""Providers and a clock that need a GPU, held to their interfaces without one.

Stand-ins have the signatures of the real libraries and compute with flashtile on the CPU, in the libraries' layouts:
what is wrong here is how a provider calls, transposes or returns.
"""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.bench.cell import Cell
from flashtile.bench.check import Checker, Verdict
from flashtile.bench.clocks.cuda import CudaClock
from flashtile.bench.inputs import make_case
from flashtile.bench.providers import Declined, Provider, make, own
from flashtile.bench.providers.flash_attn_3 import FlashAttention3

CPU = torch.device("cpu")
BASE = Cell("backward", batch=2, heads=4, heads_kv=2, seqlen_q=40, head_dim=16)
CELLS = {
    "full": BASE,
    "causal": replace(BASE, causal=True),
    "longer keys": replace(BASE, causal=True, seqlen_k=50),
    "window": replace(BASE, causal=True, window=(7, 0)),
    "window both sides": replace(BASE, window=(7, 3)),
    "softcap": replace(BASE, softcap=2.0),
    "packed": replace(BASE, lengths=(40, 3, 20), causal=True),
}


def verdict_of(provider: Provider, cell: Cell, decode: bool = False) -> Verdict:
    case = make_case(cell, CPU)
    return Checker(case).verdict(provider, provider.prepare(case, decode), decode)


def window_of(causal: bool, left: int | None, right: int | None) -> dict[str, Any]:
    sides = tuple(None if n in (None, -1) else n for n in (left, right))
    return {"causal": causal, "window": None if sides == (None, None) else sides}


def rows_first(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
    """flashtile's attention of [B, S, H, D]."""
    out, lse = flashtile.attention(*(x.transpose(1, 2) for x in (q, k, v)), return_lse=True, **keywords)
    return out.transpose(1, 2), lse


# flashtile itself ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "packed"])
def test_deterministic_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def attend(original: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any:
        asked.append((options["backend"], options.get("deterministic")))
        return original(*tensors, **options)

    for function in ("attention", "attention_varlen"):
        monkeypatch.setattr(own, function, partial(attend, getattr(own, function)))
    plain, deterministic = make(["flashtile", "flashtile:deterministic"])
    for provider, expected in ((plain, ("auto", None)), (deterministic, ("auto", True))):
        asked.clear()
        assert verdict_of(provider, CELLS[name]).ok
        assert set(asked) == {expected}


# FlashAttention-3 ----------------------------------------------------------------------------------------------------

SHARED = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
SHARED += "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
SHARED += "float softcap=0.0"
SCHEMAS = (
    f"fwd(Tensor q, Tensor k, Tensor v, {SHARED}, int num_splits=0) -> (Tensor, Tensor, Tensor, Tensor)",
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq=None, "
    f"Tensor(b!)? dk=None, Tensor(c!)? dv=None, {SHARED}) -> ()",
)


def fa3_attend(q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, *settings: Any) -> tuple[Tensor, Tensor]:
    max_q, max_k, scale, causal, left, right, softcap = settings
    keywords = {"scale": scale, "softcap": softcap or None} | window_of(causal, left, right)
    if cu_q is None:
        return rows_first(q, k, v, **keywords)
    keywords |= {"max_seqlen_q": max_q, "max_seqlen_k": max_k, "return_lse": True}
    return flashtile.attention_varlen(q, k, v, cu_q, cu_k, **keywords)  # type: ignore[return-value]


def fa3_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **keywords: Any) -> tuple[Tensor, ...]:
    out, lse = fa3_attend(q, k, v, *settings_of(rest, keywords))
    return out.contiguous(), lse.contiguous(), torch.empty(0), torch.empty(0)


def fa3_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **keywords: Any
) -> None:
    gradients = rest[:3]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        again, _ = fa3_attend(*leaves, *settings_of(rest[3:], keywords))  # type: ignore[arg-type]
    assert torch.equal(again.detach(), out)
    for target, x in zip(gradients, torch.autograd.grad(again, leaves, dout), strict=True):
        target.copy_(x)


NAMES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "is_causal")
NAMES += ("window_size_left", "window_size_right", "softcap")
DEFAULTS = (None, None, None, None, None, False, -1, -1, 0.0)


def settings_of(given: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
    positional = dict(zip(NAMES, given, strict=False))
    return [(positional | keywords).get(name, x) for name, x in zip(NAMES, DEFAULTS, strict=True)]


@pytest.fixture(scope="module")
def fa3() -> Iterator[FlashAttention3]:
    library = torch.library.Library("flash_attn_3", "DEF")
    for schema, function in zip(SCHEMAS, (fa3_forward, fa3_backward), strict=True):
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
    yield FlashAttention3(Path("unused"))
    library._destroy()


@pytest.mark.parametrize("name", CELLS)
def test_flash_attention_3_is_called_as_the_contract_means_it(fa3: FlashAttention3, name: str) -> None:
    found = verdict_of(fa3, CELLS[name])
    assert found.ok, found


def test_flash_attention_3_decodes(fa3: FlashAttention3) -> None:
    cell = replace(BASE, measure="decode", seqlen_q=1, seqlen_k=50)
    assert verdict_of(fa3, cell, decode=True).ok


# FlashAttention-2 and 4 ----------------------------------------------------------------------------------------------


def fa2_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    assert dropout_p == 0
    keywords = window_of(causal, *window_size) | {"alibi_slopes": alibi_slopes, "softcap": softcap or None}
    return rows_first(q, k, v, scale=softmax_scale, **keywords)[0]


def fa2_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    limits = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return flashtile.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **limits, **window_of(False, *window_size))  # type: ignore[return-value]


def fa2_cached(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: int, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    assert cache_seqlens == k_cache.shape[1]
    return fa2_attend(q, k_cache, v_cache, window_size=window_size)


def fa4_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    assert -1 not in window_size
    keywords = window_of(causal, *window_size) | {"sinks": learnable_sink, "softcap": softcap or None}
    return rows_first(q, k, v, scale=softmax_scale, **keywords)


def fa4_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool = False
) -> tuple[Tensor, Tensor]:
    return flashtile.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, return_lse=True)  # type: ignore[return-value]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flash_attn` and `flash_attn.cute`, as far as the providers call them."""
    second, fourth = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    functions: dict[str, Callable[..., Any]] = {"flash_attn_func": fa2_attend, "flash_attn_varlen_func": fa2_varlen}
    vars(second).update(functions | {"flash_attn_with_kvcache": fa2_cached, "__path__": []})
    vars(fourth).update({"flash_attn_func": fa4_attend, "flash_attn_varlen_func": fa4_varlen})
    for module in (second, fourth):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", [*CELLS, "alibi", "decode"])
def test_flash_attention_2_is_called_as_the_contract_means_it(name: str) -> None:
    further = {"alibi": replace(BASE, alibi=True), "decode": replace(BASE, measure="decode", seqlen_q=1, seqlen_k=50)}
    found = verdict_of(make(["fa2"])[0], (CELLS | further)[name], decode=name == "decode")
    assert found.ok, found


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", [*CELLS, "sinks"])
def test_flash_attention_4_is_called_as_the_contract_means_it(name: str) -> None:
    found = verdict_of(make(["fa4"])[0], (CELLS | {"sinks": replace(BASE, sinks=True, causal=True)})[name])
    assert found.ok, found


def ffpa_attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool, backend: str) -> Tensor:
    assert enable_gqa
    assert backend == "triton"
    return flashtile.attention(q, k, v, causal=is_causal)


def test_ffpa_is_called_as_the_contract_means_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("ffpa_attn")
    vars(module)["ffpa_attn_func"] = ffpa_attend
    monkeypatch.setitem(sys.modules, "ffpa_attn", module)
    (provider,) = make(["ffpa:triton"])
    found = verdict_of(provider, replace(BASE, head_dim=264, causal=True, heads_kv=1))
    assert found.ok, found
    with pytest.raises(Declined, match="no kernel of its own for 32 features"):
        provider.prepare(make_case(replace(BASE, head_dim=32), CPU))


# The clock -----------------------------------------------------------------------------------------------------------


class Events:
    """torch.cuda, as far as the clock calls it: every call is written down."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        name = f"event {sum(entry.startswith('new') for entry in self.log)}"
        self.log.append(f"new {name}")
        return types.SimpleNamespace(
            record=lambda: self.log.append(name),
            synchronize=lambda: self.log.append("wait"),
            elapsed_time=lambda end: 30.0,  # milliseconds
        )


def test_the_gpu_is_held_up_while_calls_are_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
    monkeypatch.setattr("torch.cuda.Event", events.event)
    monkeypatch.setattr("torch.cuda._sleep", lambda cycles: events.log.append("hold" if cycles > 0 else "no hold"))
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: events.log.append("idle"))
    clock = CudaClock(torch.device("cuda", 0))
    seconds = clock.seconds(lambda: events.log.append("call"), 5)
    assert seconds == pytest.approx(0.006)
    tries = ["idle", "call", "call", "call", "idle"]  # how long the host takes
    assert events.log == [*tries, "new event 0", "new event 1", "hold", "event 0", *["call"] * 5, "event 1", "wait"]
