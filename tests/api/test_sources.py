"""Repeated calls with inputs that are no arguments: each call makes its own of them."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from not_normalized import not_normalized
from torch import Tensor

import flashtile
from flashtile.dispatch import fast_path
from flashtile.errors import ArgumentError

Options = Callable[[], dict[str, Any]]
SLOPES, IDS = torch.rand(2), torch.tensor([0] * 10 + [1] * 14)
FIRST, FILES = 30, 8  # files that the first call of a kind enters, and a repeated one


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    fast_path.forget()
    yield
    fast_path.forget()


def qkv(**options: Any) -> list[Tensor]:
    return [torch.randn(1, 2, 24, 16, **options) for _ in range(3)]


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


CALLS: dict[str, tuple[Options, Callable[[], AbstractContextManager[Any]]]] = {
    "seed": (lambda: {"dropout_p": 0.5, "dropout_seed": int(torch.randint(99, ()))}, nullcontext),
    "drawn seed": (lambda: {"dropout_p": 0.5}, nullcontext),
    "score_mod": (lambda: {"score_mod": flashtile.score_mods.alibi(torch.rand(2))}, nullcontext),
    "mask": (lambda: {"mask": flashtile.mask_mods.document(IDS)}, nullcontext),
    "number": (lambda: {"score_mod": flashtile.score_mods.softcap(float(1 + torch.rand(())))}, nullcontext),
    "both": (lambda: CALLS["mask"][0]() | CALLS["score_mod"][0](), nullcontext),
    "autocast": (dict, autocast),
    "cast slopes": (lambda: {"alibi_slopes": SLOPES.double()}, nullcontext),
    "cast slopes under autocast": (lambda: {"alibi_slopes": SLOPES.bfloat16()}, autocast),
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_repeated(name: str, gradients: bool) -> None:
    """Without a look at the arguments, and with the values of this call."""
    options_of, around = CALLS[name]
    for n in range(6):
        tensors, options = [x.requires_grad_(gradients) for x in qkv()], options_of()
        state = torch.get_rng_state()
        with around(), not_normalized() if n > 2 else nullcontext():  # a number is an input once it has changed
            out = flashtile.attention(*tensors, **options)
        torch.set_rng_state(state)
        with around(), mock.patch.object(fast_path, "enabled", False):
            right = flashtile.attention(*tensors, **options)
        torch.testing.assert_close(out, right, rtol=0, atol=0)
        if gradients:
            dout = torch.randn_like(out)
            found, expected = (torch.autograd.grad(x, tensors, dout) for x in (out, right))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("same", ["qqq", "qkk"])
def test_one_tensor_as_several_arguments(same: str) -> None:
    for n in range(5):
        named = dict(zip("qkv", qkv(requires_grad=n > 2), strict=True))
        tensors = [named[name] for name in same]
        with not_normalized() if n in (2, 4) else nullcontext():
            out = flashtile.attention(*tensors)
        right = flashtile.attention(*(x.clone() for x in tensors), backend="reference")
        torch.testing.assert_close(out, right)
        if n > 2:
            leaves = [*{id(x): x for x in tensors}.values()]
            found, expected = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, right))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    q, k, v = qkv()
    torch.testing.assert_close(flashtile.attention(q, k, v), flashtile.attention(q, k, v, backend="reference"))


def test_lengths_that_sequences_share() -> None:
    for n, length in enumerate((3, 5, 40, 17)):
        q, keys, values = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
        with not_normalized() if n > 1 else nullcontext():
            out = flashtile.attention_with_kvcache(q, keys, values, cache_seqlens=length)
        right = flashtile.attention(q, keys[:, :, :length], values[:, :, :length], backend="reference")
        torch.testing.assert_close(out, right)
    for wrong in (41, -1, True, torch.tensor([[3]])):
        with pytest.raises(ArgumentError, match="cache_seqlens"):
            flashtile.attention_with_kvcache(q, keys, values, cache_seqlens=wrong)


def test_out_is_checked_in_each_call() -> None:
    q, k, v = qkv()
    for n in range(4):
        out = torch.empty_like(q)
        with not_normalized() if n > 1 else nullcontext():
            assert flashtile.attention(q, k, v, out=out) is out
        torch.testing.assert_close(out, flashtile.attention(q, k, v, backend="reference"))
    right = flashtile.attention(q, k, v)
    memory = torch.zeros(2, *q.shape)
    inside = flashtile.attention(memory[0].copy_(q), k, v, out=memory[0])  # kernels would read what they have written
    assert torch.equal(inside, right)
    with pytest.raises(ArgumentError, match="out"):
        flashtile.attention(q, k, v, out=torch.empty(1, 2, 24, 1).expand(q.shape))


def test_other_functions_of_pairs() -> None:
    """In the place of one whose calls are known: with another formula, dtype or kind of argument."""
    q, k, v = qkv()
    for _ in range(3):
        flashtile.attention(q, k, v, score_mod=flashtile.score_mods.alibi(SLOPES))
        flashtile.attention(q, k, v, mask=flashtile.mask_mods.document(IDS))
    others: list[dict[str, Any]] = [{"score_mod": flashtile.score_mods.decay(SLOPES)}]
    others += [{"score_mod": flashtile.score_mods.alibi(SLOPES.double())}, {"score_mod": lambda s, b, h, i, j: s * 2}]
    others += [{"mask": torch.rand(1, 1, 24, 24) < 0.7}, {"mask": flashtile.mask_mods.document(IDS[:1].expand(24))}]
    for options in others:
        right = flashtile.attention(q, k, v, **options, backend="reference")
        torch.testing.assert_close(flashtile.attention(q, k, v, **options), right)
    for seed in range(3):
        flashtile.attention(q, k, v, dropout_p=0.1, dropout_seed=seed)
    for wrong in ("4", torch.tensor([1, 2]), 2**64):
        with pytest.raises(ArgumentError, match="dropout_seed"):
            flashtile.attention(q, k, v, dropout_p=0.1, dropout_seed=wrong)  # type: ignore[arg-type]


def entered(call: Callable[[], Any]) -> set[str]:
    """Files of the package that a call enters."""
    root, files = str(Path(flashtile.__file__).parent), set()

    def note(frame: Any, event: str, _: Any) -> None:
        is_function = frame.f_code.co_flags & inspect.CO_NEWLOCALS  # no module that is imported
        if event == "call" and is_function and frame.f_code.co_filename.startswith(root):
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def test_the_first_call_of_a_kind_enters_few_files() -> None:
    """One whose kernel is there: to make it is another matter."""
    q, k, v = qkv()
    flashtile.attention(q, k, v, causal=True)
    fast_path.forget()
    assert 10 < len(entered(lambda: flashtile.attention(q, k, v, causal=True))) <= FIRST


@pytest.mark.parametrize("gradients", [False, True])
def test_a_repeated_call_enters_few_files(gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    tensors = [x.requires_grad_(gradients) for x in qkv()]
    for _ in range(2):
        flashtile.attention(*tensors)
    files = entered(lambda: flashtile.attention(*tensors))
    assert 3 < len(files) <= FILES, files
