"""Arguments that the functions of FlashAttention-2, -3 and -4 share, in the forms in which programs pass them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flash_formula import randn

from flashtile.compat import flash_attn, flash_attn_3, flash_attn_4
from flashtile.errors import ArgumentError

Q, K, V = randn(2, 5, 4, 6), randn(2, 7, 2, 6, seed=1), randn(2, 7, 2, 6, seed=2)
CU_Q, CU_K = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 2, 7], dtype=torch.int32)
CALLS: dict[str, Callable[..., Any]] = {
    "dense 2": lambda **x: flash_attn.flash_attn_func(Q, K, V, **x),
    "packed 2": lambda **x: flash_attn.flash_attn_varlen_func(Q[0], K[0], V[0], CU_Q, CU_K, 3, 5, **x),
    "cache 2": lambda **x: flash_attn.flash_attn_with_kvcache(Q, K.clone(), V.clone(), **x),
    "dense 3": lambda **x: flash_attn_3.flash_attn_func(Q, K, V, **x),
    "packed 3": lambda **x: flash_attn_3.flash_attn_varlen_func(Q[0], K[0], V[0], CU_Q, CU_K, 3, 5, **x),
    "cache 3": lambda **x: flash_attn_3.flash_attn_with_kvcache(Q, K.clone(), V.clone(), **x),
    "dense 4": lambda **x: flash_attn_4.flash_attn_func(Q, K, V, **x)[0],
    "packed 4": lambda **x: flash_attn_4.flash_attn_varlen_func(
        Q[0], K[0], V[0], cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, **x
    )[0],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_window_may_be_a_tensor(call: Callable[..., Any]) -> None:
    expected = call(window_size=(2, 1))
    assert not torch.equal(call(), expected)
    for window in (torch.tensor([2, 1]), (torch.tensor(2), 1), [2, torch.tensor([1], dtype=torch.int32)]):
        assert torch.equal(call(window_size=window), expected)
    for window in (torch.tensor([2.0, 1.0]), torch.tensor(2), torch.tensor([2, 1, 0]), (torch.ones(3).int(), 1)):
        with pytest.raises(ArgumentError, match="`window_size`"):
            call(window_size=window)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_numbers_that_turn_a_setting_off(call: Callable[..., Any]) -> None:
    """`None` too; what is no number is refused by its name."""
    expected = call()
    assert all(torch.equal(call(softcap=x), expected) for x in (None, 0, -1.0))
    with pytest.raises(ArgumentError, match="`softcap`"):
        call(softcap="2")


@pytest.mark.parametrize("name", ["dense 3", "packed 3", "cache 3"])
def test_chunks_that_are_none(name: str) -> None:
    assert all(torch.equal(CALLS[name](attention_chunk=x), CALLS[name]()) for x in (None, 0, -1))
    with pytest.raises(ArgumentError, match="`attention_chunk`"):
        CALLS[name](attention_chunk=2.5)


@pytest.mark.parametrize("name", ["cache 2", "dense 3", "packed 3", "cache 3", "dense 4", "packed 4"])
def test_splits_that_the_backend_chooses(name: str) -> None:
    assert all(torch.equal(CALLS[name](num_splits=x), CALLS[name]()) for x in (None, 0, -1))
    with pytest.raises(ArgumentError, match="`num_splits`"):
        CALLS[name](num_splits="2")
