"""Plain eager calls bypass the operators; in all other calls PyTorch sees an operator."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile
from flashtile import private_torch
from flashtile.call.eager import is_plain_eager
from flashtile.call.memory import Layouts, layout_key
from flashtile.dispatch.operators import OPERATORS
from flashtile.errors import ArgumentError

Q, K, V = (torch.randn(1, 2, 8, 16) for _ in range(3))
CACHE = torch.randn(2, 1, 2, 16, 16)
LENGTHS = torch.tensor([5], dtype=torch.int32)


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


@contextmanager
def operator_calls() -> Iterator[mock.Mock]:
    """Calls of the dense forward operator from eager code."""
    with mock.patch.object(OPERATORS["dense"], "forward", wraps=OPERATORS["dense"].forward) as operator:
        yield operator


def test_a_plain_call_needs_no_operator() -> None:
    with operator_calls() as operator:
        flashtile.attention(Q, torch.nn.Parameter(K), V)
        with torch.autocast("cpu", torch.bfloat16):
            flashtile.attention(Q, torch.nn.Parameter(K), V.bfloat16())
    assert operator.call_count == 0
    assert is_plain_eager(Q, None, torch.nn.Parameter(K))


@pytest.mark.parametrize("looking", [Recording, Functions, profile])
def test_what_looks_at_calls_sees_an_operator(looking: Callable[[], Any]) -> None:
    expected = flashtile.attention(Q, K, V)
    with operator_calls() as operator, looking():
        found = flashtile.attention(Q, K, V)
    assert operator.call_count == 1
    assert torch.equal(found, expected)


def test_a_mode_sees_both_passes_and_the_cache() -> None:
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    with Recording() as mode:
        flashtile.attention(*leaves).sum().backward()
        flashtile.attention_with_kvcache(Q[:, :, :1], *CACHE, cache_seqlens=LENGTHS)
    seen = [name for name in mode.names if name.startswith("attention")]
    assert seen == ["attention_forward", "attention_backward", "attention_with_kvcache"]


def test_a_profile_has_the_operator() -> None:
    with profile() as profiled:
        flashtile.attention(Q, K, V)
    assert "flashtile::attention_forward" in {event.key for event in profiled.key_averages()}


def more_than_memory() -> dict[str, Tensor]:
    """Tensors whose elements are not what lies in their memory."""
    return {
        "negated": torch.randn(1, 2, 8, 16, dtype=torch.cfloat).conj().imag,
        "zeros": torch._efficientzerotensor((1, 2, 8, 16)),
        "subclass": torch.randn(1, 2, 8, 16).as_subclass(Subclass),
    }


@pytest.mark.parametrize("name", more_than_memory())
def test_tensors_that_are_more_than_their_memory(name: str) -> None:
    x = more_than_memory()[name]
    plain = torch.empty_strided(x.shape, x.stride()).copy_(x)
    expected = flashtile.attention(Q, K, plain)  # a call like it, but for that
    with operator_calls() as operator:
        found = flashtile.attention(Q, K, x)
    assert operator.call_count == 1
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "x", [torch._efficientzerotensor((2, 3)), torch.empty(2, 3, device="meta"), torch.eye(3).to_sparse()]
)
def test_tensors_without_memory_of_their_own(x: Tensor) -> None:
    assert layout_key([Q, x]) is None
    assert layout_key([Q, None, torch.empty(0, 3)]) is not None


def test_tensors_without_memory() -> None:
    assert flashtile.attention(*(x.to("meta") for x in (Q, K, V))).is_meta


MISALIGNED = torch.empty(257)[1:].view(1, 2, 8, 16)
OTHER_LAYOUTS = {
    "shape": torch.randn(1, 2, 8, 15),
    "strides": torch.randn(1, 2, 8, 20)[..., :16],
    "order": torch.randn(1, 8, 2, 16).transpose(1, 2),
    "dtype": Q.bfloat16(),
    "device": Q.to("meta"),
    "alignment": MISALIGNED,
    "a view of negated memory": torch._neg_view(Q),
    "subclass": Q.as_subclass(Subclass),
}


@pytest.mark.parametrize("what", OTHER_LAYOUTS)
@pytest.mark.parametrize("guarded", [True, False])
def test_layouts_match_those_of_their_kind(what: str, guarded: bool) -> None:
    guard = private_torch.tensor_guard if guarded else lambda _: None
    with mock.patch.object(private_torch, "tensor_guard", guard):
        layouts = Layouts([Q, K])
    assert layouts.match([Q.clone(), V])
    assert layouts.match_plain([Q.clone(), V]) is guarded
    other = OTHER_LAYOUTS[what]
    assert not layouts.match_plain([Q, other])
    if what not in ("a view of negated memory", "subclass"):  # which are laid out alike
        assert not layouts.match([Q, other])
        assert Layouts([Q, other]).match([Q.clone(), other])


def test_layouts_of_freed_memory_match_nothing() -> None:
    x = Q.clone()
    layouts = Layouts([x])
    x.untyped_storage().resize_(0)
    assert not layouts.match([x])
    assert Layouts([x]).key is None


@pytest.mark.filterwarnings("ignore")  # tracing is deprecated, and reads shapes
def test_a_trace_has_the_operator() -> None:
    traced = torch.jit.trace(lambda *x: flashtile.attention(*x), (Q, K, V), check_trace=False)
    assert "flashtile::attention_forward" in str(traced.graph)


def test_a_wrapper_that_outlived_its_transform() -> None:
    kept: list[Tensor] = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(Q)
    assert torch.equal(flashtile.attention(kept[0].detach(), K, V), flashtile.attention(Q, K, V))


def test_a_call_that_autocast_made_right_is_wrong_without_it() -> None:
    q, k, v = (torch.randn(1, 2, 1, 16) for _ in range(3))
    caches = torch.zeros(2, 1, 2, 16, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        flashtile.attention_with_kvcache(q, *caches, cache_seqlens=LENGTHS, k=k, v=v)
    with pytest.raises(ArgumentError, match="dtype of q"):
        flashtile.attention_with_kvcache(q.bfloat16(), *caches, cache_seqlens=LENGTHS, k=k, v=v)


def test_right_arguments_of_one_function_are_not_those_of_another() -> None:
    flashtile.attention(Q, K, V)
    with pytest.raises(ArgumentError, match="cu_seqlens_q"):
        flashtile.attention_varlen(Q, K, V, None, None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="causal"):
        flashtile.attention(Q, K, V, causal=0)  # type: ignore[arg-type]  # equal to False
    with pytest.raises(ArgumentError, match="window"):
        flashtile.attention(Q, K, V, window=(1.0, 2))  # type: ignore[arg-type]
