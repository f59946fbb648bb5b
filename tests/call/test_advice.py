"""Callers who know another library's attention get an answer that shows the call that works here."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import ArgumentError


def sdpa(q: Tensor, k: Tensor, v: Tensor, *more: Any, **keywords: Any) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, *more, **{"enable_gqa": True} | keywords)


X = torch.randn(2, 8, 6, 4)  # [B, H, S, D], self-attention of 2 heads for each key head
SELF = (X, X[:, :4], X[:, 4:])
CROSS = (X, torch.randn(2, 2, 7, 4), torch.randn(2, 2, 7, 4))
attention = functools.partial(flashtile.attention, *SELF)
varlen = functools.partial(flashtile.attention_varlen, X[0], X[0], X[0], torch.tensor([0, 8]), torch.tensor([0, 8]))
ROWS, SCORES = (torch.rand(6, 6) > 0.3) | torch.eye(6, dtype=torch.bool), torch.randn(6, 6)
PADDING = torch.arange(6) < torch.tensor([[4], [6]])  # [B, S]


def transposed(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


@pytest.mark.parametrize(
    ("tensors", "more", "keywords", "argument", "right"),
    [
        (SELF, (), {"is_causal": True}, "is_causal", lambda: sdpa(*SELF, is_causal=True)),
        (SELF, (), {"enable_gqa": True}, "enable_gqa", lambda: sdpa(*SELF)),
        (SELF, (), {"attn_mask": ROWS}, "attn_mask", lambda: sdpa(*SELF, ROWS)),
        (SELF, (), {"attn_mask": SCORES}, "attn_mask", lambda: sdpa(*SELF, SCORES)),
        (SELF, (ROWS,), {}, "argument 4", lambda: sdpa(*SELF, ROWS)),
        (SELF, (), {"mask": ROWS}, "mask", lambda: sdpa(*SELF, ROWS)),
        (SELF, (), {"mask": ROWS.int()}, "mask", lambda: sdpa(*SELF, ROWS)),
        (SELF, (), {"mask": SCORES}, "mask", lambda: sdpa(*SELF, SCORES)),
        (SELF, (), {"mask": PADDING}, "mask", lambda: sdpa(*SELF, PADDING[:, None, None])),
        (SELF, (), {"mask": ROWS.expand(2, 6, 6)}, "mask", lambda: sdpa(*SELF, ROWS)),
        (SELF, (), {"bias": SCORES.expand(8, 6, 6)}, "bias", lambda: sdpa(*SELF, SCORES)),
        (SELF, (), {"bias": ROWS}, "bias", lambda: sdpa(*SELF, ROWS)),
        ((X[0], X[1], X[1]), (), {}, "q", lambda: sdpa(X[0], X[1], X[1], enable_gqa=False)),
        ((X[0, 0], X[0, 1], X[0, 2]), (), {}, "q", lambda: sdpa(X[0, 0], X[0, 1], X[0, 2], enable_gqa=False)),
        (transposed(*CROSS), (), {}, "k", lambda: transposed(sdpa(*CROSS))[0]),
        (transposed(*SELF), (), {"bias": SCORES[None, None]}, "bias", lambda: transposed(sdpa(*SELF, SCORES))[0]),
    ],
)  # fmt: skip
def test_the_example_is_the_call_that_was_meant(
    tensors: tuple[Tensor, ...], more: tuple[Any, ...], keywords: dict[str, Any], argument: str, right: Any
) -> None:
    with pytest.raises(ArgumentError) as raised:
        flashtile.attention(*tensors, *more, **keywords)
    assert raised.value.argument == argument
    (example,) = re.findall(r"a call that works: (flashtile\.attention\(.*?)(?: for \[|, if |$)", str(raised.value))
    names = dict(zip("qkv", tensors, strict=True)) | dict.fromkeys(["attn_mask"], *more or [None]) | keywords
    torch.testing.assert_close(eval(example, {"flashtile": flashtile} | names), right())


@pytest.mark.parametrize(
    ("call", "keyword", "answer"),
    [
        (attention, "windw", "`window`? The arguments are q, k, v, q_descale, k_descale, v_descale, causal, window, "),
        (attention, "softmax_scale", "`scale`\n  a call that works: flashtile.attention(q, k, v, scale=0.125)"),
        (attention, "max_seqlen_q", "`max_seqlen_q` in flashtile.attention_varlen"),
        (varlen, "block_table", "flashtile.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, page_table=table)"),
    ],
)
def test_unknown_keyword(call: Callable[..., Tensor], keyword: str, answer: str) -> None:
    with pytest.raises(TypeError) as raised:
        call(**{keyword: 3})
    assert isinstance(raised.value, ArgumentError)
    assert str(raised.value).startswith(f"`{keyword}` is int 3.\n  accepted: ")
    assert answer in str(raised.value)


def test_signatures_show_named_arguments_alone() -> None:
    for function in (flashtile.attention, flashtile.attention_varlen, flashtile.attention_with_kvcache):
        kinds = {x.kind for x in inspect.signature(function).parameters.values()}
        assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
