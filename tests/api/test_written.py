"""Tensors that a call writes into: autograd counts the write, inference tensors and views of a cache are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.errors import ArgumentError

CU = torch.tensor([0, 20, 32], dtype=torch.int32)
LENGTHS = torch.tensor([3, 3], dtype=torch.int32)
REPEATS = 4  # planned, recorded, replayed, and repeated by its arguments


def dense(out: Tensor, **keywords: Any) -> Tensor:
    q = torch.ones_like(out)
    return flashtile.attention(q, q.clone(), q.clone(), out=out, **keywords)


def varlen(out: Tensor, **keywords: Any) -> Tensor:
    q = torch.ones_like(out)
    return flashtile.attention_varlen(q, q.clone(), q.clone(), CU.to(q.device), CU.to(q.device), out=out, **keywords)


def with_cache(out: Tensor, **keywords: Any) -> Tensor:
    q = torch.ones_like(out)
    return flashtile.attention_with_kvcache(q, q.clone(), q.clone(), cache_seqlens=LENGTHS, out=out, **keywords)


def appending(cache: Tensor, **keywords: Any) -> Any:
    """One token for each sequence, into a cache whose values are its keys times 2."""
    new = torch.ones_like(cache[:, :, :1])
    lengths = LENGTHS.to(cache.device)
    return flashtile.attention_with_kvcache(
        new, cache, torch.zeros_like(cache), cache_seqlens=lengths, k=new, v=new, **keywords
    )


WRITERS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "attention": (dense, (2, 2, 16, 16)),
    "attention_varlen": (varlen, (32, 2, 16)),
    "attention_with_kvcache": (with_cache, (2, 2, 16, 16)),
    "appended keys": (appending, (2, 2, 16, 16)),
}


def check_saved_tensor(write: Callable[[Tensor], Any], shape: tuple[int, ...], device: str = "cpu") -> None:
    for _ in range(REPEATS):
        x, buffer = torch.randn(shape, requires_grad=True, device=device), torch.zeros(shape, device=device)
        y = (x * buffer).sum()
        with torch.no_grad():
            write(buffer)
        assert buffer.any()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


@pytest.mark.parametrize("backend", ["auto", "tiled"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_saved_tensor_is_not_overwritten_unseen(name: str, backend: str) -> None:
    write, shape = WRITERS[name]
    check_saved_tensor(lambda buffer: write(buffer, backend=backend), shape)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["attention", "attention_varlen", "appended keys"])
def test_a_saved_tensor_is_not_overwritten_unseen_on_a_gpu(name: str) -> None:
    write, shape = WRITERS[name]
    check_saved_tensor(write, shape, "cuda")


@pytest.mark.parametrize("name", ["attention", "appended keys"])
def test_compiled(name: str) -> None:
    write, shape = WRITERS[name]
    torch._dynamo.reset()
    check_saved_tensor(torch.compile(write, backend="aot_eager"), shape)


@pytest.mark.parametrize("name", WRITERS)
def test_inference_tensors(name: str) -> None:
    """They are written in inference mode alone, whatever earlier calls of the same layout were."""
    write, shape = WRITERS[name]
    with torch.inference_mode():
        frozen = torch.zeros(shape)
    for _ in range(REPEATS):
        with torch.inference_mode():
            write(frozen)
            write(plain := torch.zeros(shape))
            assert plain.any()
        with torch.no_grad(), pytest.raises(ArgumentError, match=r"made outside of torch\.inference_mode"):
            write(frozen)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_new_tokens_that_are_a_view_of_a_cache(name: str, cache: str) -> None:
    """A copy of one cache would see what the other one's copy has written, or not."""
    q, new = torch.randn(2, 2, 2, 8), torch.randn(2, 2, 2, 8)
    caches = {"k_cache": torch.randn(2, 2, 16, 8), "v_cache": torch.randn(2, 2, 16, 8)}
    before = [x.clone() for x in caches.values()]

    def run(**tokens: Tensor) -> None:
        flashtile.attention_with_kvcache(q, **caches, cache_seqlens=LENGTHS, **({"k": new, "v": new} | tokens))  # type: ignore[arg-type]

    for _ in range(REPEATS):
        with pytest.raises(ArgumentError, match="share no element with a cache"):
            run(**{name: caches[cache][:, :, 3:5]})
        assert all(map(torch.equal, caches.values(), before))
        run()
        before = [x.clone() for x in caches.values()]


def test_new_tokens_between_those_of_a_cache() -> None:
    """One tensor may hold a cache and new tokens, as long as no element is in both."""
    both = torch.zeros(2, 2, 16, 2, 8)
    cache, other = both.unbind(3)
    q = torch.ones(2, 2, 1, 8)
    for _ in range(REPEATS):
        new = other[:, :, :1].fill_(1)
        flashtile.attention_with_kvcache(q, cache, torch.zeros(2, 2, 16, 8), cache_seqlens=LENGTHS, k=new, v=new)
        assert cache[:, :, 3].all()
