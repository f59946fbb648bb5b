"""`flashtile.calls()`: every pass counts once, whoever asked for it and however it runs, and says why it runs there."""

import threading
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtile
from flashtile.api import repeated
from flashtile.call import counting
from flashtile.compat import flash_attn
from flashtile.compat.torch import activate


def inputs(**options: Any) -> list[Tensor]:
    return [torch.randn(1, 2, 24, 16, **options) for _ in range(3)]


def counted(counts: flashtile.CallCounts) -> dict[tuple[str, str, str], int]:
    return {row[:3]: row.calls for row in counts.rows}


def lgamma(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    return torch.lgamma(score)


FORWARD, BACKWARD = ("attention", "forward", "cpu"), ("attention", "backward", "cpu")


def test_every_pass_of_a_repeated_call_counts_once() -> None:
    """Before, inside and after the block, where it is not counted and its short way is taken again."""
    tensors = inputs(requires_grad=True)
    run_repeated = mock.patch.object(repeated.Repeated, "match", autospec=True, side_effect=repeated.Repeated.match)

    def step() -> Tensor:
        return flashtile.attention(*tensors, causal=True)

    for _ in range(4):
        step().sum().backward()
    pending = step()
    with flashtile.calls() as counts:
        for n in range(1, 5):
            step().sum().backward()
            assert counted(counts) == {FORWARD: n, BACKWARD: n}
        pending.sum().backward()  # of a call that was made outside
    assert counted(counts) == {FORWARD: 4, BACKWARD: 5}
    assert counts.total == 4
    with run_repeated as match:
        step().sum().backward()
    assert match.call_count == 1
    assert counted(counts) == {FORWARD: 4, BACKWARD: 5}


def test_blocks_are_nested() -> None:
    with flashtile.calls() as outer:
        flashtile.attention(*inputs())
        with flashtile.calls() as inner:
            flashtile.attention(*inputs())
    assert (outer.total, inner.total, counting.opened) == (2, 1, ())
    with flashtile.calls() as counts:
        assert str(counts) == "no calls of flashtile"


@pytest.mark.filterwarnings("ignore::flashtile.AttentionWarning")  # `tiled` is slow
def test_reasons() -> None:
    q, k, v = inputs()
    with flashtile.calls() as counts:
        flashtile.attention(q, k, v, score_mod=lgamma)
        flashtile.attention(q, k, v, backend="reference")
    untraced, named = counts.rows
    assert untraced.backend == "tiled"
    assert any(x.startswith("not cpu: the score_mod cannot be traced") for x in untraced.why)
    assert named == ("attention", "forward", "reference", ("named by `backend`",), 1)
    assert str(counts).endswith("\n1 x attention, forward: reference\n  named by `backend`")


def test_the_variable_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_BACKEND", "tiled")
    with flashtile.calls() as counts:
        flashtile.attention(*inputs())
    assert counts.rows[0][2:4] == ("tiled", ("named by FLASHTILE_BACKEND",))


def test_other_functions_and_other_names() -> None:
    q, k, v = inputs()
    offsets = torch.tensor([0, 10, 24], dtype=torch.int32)
    with flashtile.calls() as counts:
        flash_attn.flash_attn_func(q.mT, k.mT, v.mT, causal=True)
        flashtile.attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), offsets, offsets)
        flashtile.attention_with_kvcache(q[:, :, :1], k, v, cache_seqlens=torch.tensor([9], dtype=torch.int32))
    functions = ("attention", "attention_varlen", "attention_with_kvcache")
    assert counted(counts) == {(name, "forward", "cpu"): 1 for name in functions}


def test_compiled_calls_count_when_they_run() -> None:
    tensors = inputs(requires_grad=True)
    compiled = torch.compile(
        lambda *x: flashtile.attention(*x) + flashtile.attention(*x, scale=1.0), backend="aot_eager"
    )
    with flashtile.calls() as counts:
        for n in range(1, 4):
            compiled(*tensors).sum().backward()
            assert counted(counts) == {FORWARD: 2 * n, BACKWARD: 2 * n}


def test_activated_calls_have_the_name_of_their_operator() -> None:
    pytest.importorskip("torch.nn.attention._registry")
    tensors = inputs(requires_grad=True)
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    with flashtile.calls() as counts:
        scaled_dot_product_attention(*tensors).sum().backward()
        assert counts.total == 0
        with activate():
            scaled_dot_product_attention(*tensors).sum().backward()
        flashtile.attention(*tensors)
    assert counted(counts) == {(name, "forward", "cpu"): 1, (f"{name}_backward", "backward", "cpu"): 1, FORWARD: 1}


def test_threads_count_together() -> None:
    tensors = inputs()

    def work() -> None:
        for _ in range(30):
            flashtile.attention(*tensors)

    with flashtile.calls() as counts:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counted(counts) == Counter({FORWARD: 120})


def test_a_failed_call_does_not_count() -> None:
    q, k, v = inputs()
    with flashtile.calls() as counts, pytest.raises(flashtile.AttentionError):
        flashtile.attention(q, k[:, :0], v)
    assert counts.rows == ()
