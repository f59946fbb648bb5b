"""Repeated calls: nothing is looked at again, and everything that makes a call another one is seen."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from not_normalized import not_normalized
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile
from flashtile.backend.cpu import host_cache
from flashtile.dispatch import fast_path
from flashtile.errors import ArgumentError, AttentionError

OPTIONS: dict[str, Any] = {"scale": 0.5, "window": (5, 2)}
SLOPES = torch.rand(2)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    fast_path.forget()
    yield
    fast_path.forget()


def inputs(**options: Any) -> list[Tensor]:
    return [torch.randn(1, 2, 24, 16, **options) for _ in range(3)]


def reference(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return flashtile.attention(q, k, v, backend="reference", **OPTIONS | options)


def repeated_calls() -> list[list[Any]]:
    return [x for x in fast_path.table.recent.values() if isinstance(x, list)]


def known(**options: Any) -> None:
    """Make a call until it is repeated."""
    for _ in range(3):
        flashtile.attention(*inputs(**options), **OPTIONS)


@contextmanager
def in_transform() -> Iterator[None]:
    """Inside torch.vmap, without a tensor that it maps."""
    torch._C._functorch._vmap_increment_nesting(1, "error")
    try:
        yield
    finally:
        torch._C._functorch._vmap_decrement_nesting()


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


def test_scalars_are_the_same_if_they_are_equal() -> None:
    known()
    q, k, v = inputs()
    with not_normalized():
        out = flashtile.attention(q, k, v, scale=float("0.5"), window=tuple([5, 2]))  # noqa: C409 - other objects
    torch.testing.assert_close(out, reference(q, k, v))


@pytest.mark.parametrize("options", [{"window": (5, True)}, {"window": (5.0, 2)}, {"scale": True}])
def test_equal_scalars_of_other_types(options: dict[str, Any]) -> None:
    for _ in range(3):
        flashtile.attention(*inputs(), scale=1, window=(5, 1 if options.get("window") == (5, True) else 2))
    with pytest.raises(ArgumentError, match=next(iter(options))):
        flashtile.attention(*inputs(), **{"scale": 1, "window": (5, 2)} | options)


OTHERS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "strides": lambda x: [x[0], x[1].mT.contiguous().mT, x[2]],
    "rows": lambda x: [x[0][:, :, :7], *x[1:]],
    "address": lambda x: [torch.randn(1, 2, 24, 17)[..., 1:], *x[1:]],
    "dtype": lambda x: [y.double() for y in x],
    "one tensor": lambda x: [x[0], x[0], x[0]],
    "negative": lambda x: [torch.complex(x[0], x[0]).conj().imag, *x[1:]],
    "parameter": lambda x: [torch.nn.Parameter(x[0]), *x[1:]],
}


@pytest.mark.parametrize("change", OTHERS)
def test_other_tensors(change: str) -> None:
    known()
    for _ in range(4):
        q, k, v = OTHERS[change](inputs())
        torch.testing.assert_close(flashtile.attention(q, k, v, **OPTIONS), reference(q, k, v))


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "mode": Mode,
    "fake tensors": FakeTensorMode,
    "profiler": torch.autograd.profiler.profile,
    "transform": in_transform,
    "forward mode": torch.autograd.forward_ad.dual_level,
    "variable": lambda: mock.patch.dict("os.environ", FLASHTILE_BACKEND="tiled"),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_a_call(name: str) -> None:
    known()
    q, k, v = inputs()
    with AROUND[name](), not_normalized(), pytest.raises(AssertionError, match="looked at"):
        flashtile.attention(q, k, v, **OPTIONS)
    if name == "fake tensors":  # which has no results to compare
        return
    tolerance = {"rtol": 0.05, "atol": 0.05} if name == "autocast" else {}
    for around in (AROUND[name], nullcontext, AROUND[name]):
        for _ in range(3):
            with around():
                out = flashtile.attention(q, k, v, **OPTIONS)
            torch.testing.assert_close(out.float(), reference(q, k, v), **tolerance)


def test_autocast_of_another_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float16) * 2:
        with torch.autocast("cpu", dtype):
            for _ in range(4):
                assert flashtile.attention(*inputs(dtype=torch.bfloat16), **OPTIONS).dtype == dtype


def test_arguments_by_position() -> None:
    """More of them, or fewer, than the function takes."""
    known()
    q, k, v = inputs()
    with pytest.raises(ArgumentError, match="argument 4"):
        flashtile.attention(q, k, v, torch.ones(1, 2, 24, 24, dtype=torch.bool), **OPTIONS)  # type: ignore[call-overload]
    for _ in range(3):
        flashtile.attention(q, k, v)
    with pytest.raises(TypeError, match="'v'"):
        flashtile.attention(q, k)  # type: ignore[call-overload]


def test_determinism_is_asked_for() -> None:
    known()
    torch.use_deterministic_algorithms(True)
    try:
        with not_normalized(), pytest.raises(AssertionError, match="looked at"):
            flashtile.attention(*inputs(), **OPTIONS)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "options", [{}, {"return_lse": True}, {"alibi_slopes": SLOPES}], ids=lambda x: " ".join(x) or "plain"
)
@pytest.mark.parametrize("requested", ["q", "kv", "qkv"])
def test_gradients(requested: str, options: dict[str, Any]) -> None:
    """Of some inputs, through both results or one, and with the graph of a second derivative."""
    options = {name: x.clone().requires_grad_() if isinstance(x, Tensor) else x for name, x in options.items()}

    def gradients(attend: Callable[..., Any], used: slice, *, twice: bool = False) -> list[Tensor]:
        results = attend(*tensors.values(), **options)
        results = results if isinstance(results, tuple) else (results,)
        found = torch.autograd.grad(sum(x.square().sum() for x in results[used]), leaves, create_graph=twice)
        return [*found, *torch.autograd.grad(sum(x.square().sum() for x in found), leaves)] if twice else [*found]

    def repeated(*x: Tensor, **options: Any) -> Any:
        with not_normalized():
            return flashtile.attention(*x, **OPTIONS, **options)

    for n in range(6):
        tensors = dict(zip("qkv", inputs(dtype=torch.float64), strict=True))
        leaves = [tensors[name].requires_grad_() for name in requested]
        leaves += [x for x in options.values() if isinstance(x, Tensor)]
        for _ in range(3 * (n == 0)):
            with torch.no_grad():
                flashtile.attention(*tensors.values(), **OPTIONS, **options)
        attend = repeated if n > 2 else lambda *x, **options: flashtile.attention(*x, **OPTIONS, **options)
        for used in (slice(None), slice(1), *[slice(1, 2)] * ("return_lse" in options and requested != "kv")):
            torch.testing.assert_close(gradients(attend, used), gradients(reference, used))
        with torch.no_grad():
            results = flashtile.attention(*tensors.values(), **OPTIONS, **options)
        assert not (results[0] if isinstance(results, tuple) else results).requires_grad
    torch.testing.assert_close(gradients(repeated, slice(1), twice=True), gradients(reference, slice(1), twice=True))


def test_a_seed_is_drawn_for_each_call() -> None:
    q, k, v = inputs()
    outs = [flashtile.attention(q, k, v, dropout_p=0.5) for _ in range(5)]
    assert all(not torch.equal(outs[0], x) for x in outs[1:])


def test_nothing_is_kept_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that are written in ever new ways."""
    monkeypatch.setattr(fast_path, "GENERATION", 4)
    for n in range(1, 40):
        for rows in (n, 8):
            for _ in range(3):
                flashtile.attention(*inputs()[:1], *[x[:, :, :rows] for x in inputs()[1:]], window=(n, 0))
    assert len(fast_path.table.recent) + len(fast_path.table.older) <= 2 * 4
    assert max(map(len, repeated_calls())) <= 16


def cache_call(**new: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    q, k_cache, v_cache = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
    return [q, k_cache, v_cache], {"cache_seqlens": torch.tensor([5, 30], dtype=torch.int32), "causal": True, **new}


@pytest.mark.parametrize("appends", [False, True])
def test_a_cache(appends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(lengths: tuple[int, int]) -> tuple[list[Tensor], dict[str, Any]]:
        tensors, options = cache_call(**{name: torch.randn(2, 2, 1, 16) for name in ("k", "v") if appends})
        return tensors, options | {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}

    for _ in range(3):
        tensors, options = one((5, 30))
        flashtile.attention_with_kvcache(*tensors, **options)
    for lengths, alone in (((0 if appends else 1, 39), 2), ((17, 3), 1), ((9, 9), 1)):
        monkeypatch.setattr(host_cache, "MOST_APPENDED_ALONE", alone)
        tensors, options = one(lengths)
        expected = [x.clone() for x in tensors]
        with not_normalized():
            out = flashtile.attention_with_kvcache(*tensors, **options)
        result = flashtile.attention_with_kvcache(*expected, **options, backend="reference")
        torch.testing.assert_close(out, result)
        assert all(map(torch.equal, tensors, expected))
    assert sum(map(len, repeated_calls())) == 1
    for lengths in ((41, 3), (40 if appends else 41, 40), (5, -1)):
        tensors, options = one(lengths)
        with pytest.raises(ArgumentError, match=r"cache_seqlens|k_cache"):
            flashtile.attention_with_kvcache(*tensors, **options)


def test_caches_that_overlap() -> None:
    """After a call with caches of the same layouts that do not."""
    new = {"k": torch.randn(2, 2, 1, 16), "v": torch.randn(2, 2, 1, 16)}
    for _ in range(3):
        tensors, options = cache_call(**new)
        flashtile.attention_with_kvcache(*tensors, **options)
    memory = torch.randn(2, 2, 41, 16).flatten()
    k_cache, v_cache = (memory[n * 16 :][: 2 * 2 * 40 * 16].view(2, 2, 40, 16) for n in (0, 1))
    with pytest.raises(ArgumentError, match="shares no element"):
        flashtile.attention_with_kvcache(tensors[0], k_cache, v_cache, **options)


def test_a_cache_has_no_derivative() -> None:
    for _ in range(3):
        tensors, options = cache_call()
        flashtile.attention_with_kvcache(*tensors, **options)
    with pytest.raises(AttentionError, match="no derivatives"):
        flashtile.attention_with_kvcache(tensors[0].requires_grad_(), *tensors[1:], **options)
