"""Ready score modifications and masks against PyTorch's FlexAttention, which runs the same functions by torch.vmap."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from ready_masks import EXPECTED as MASKS
from ready_masks import N
from torch import Tensor
from torch.nn.attention import flex_attention

import flashtile
from flashtile import MaskMod, ScoreMod, score_mods

B, H = 2, 4
HEAD = torch.linspace(0.3, 0.9, H)
SCORES = {
    "alibi": score_mods.alibi(HEAD),
    "decay": score_mods.decay(HEAD),
    "relative_table": score_mods.relative_table(torch.randn(H, 11)),
    "softcap": score_mods.softcap(3.0),
    "t5_buckets": score_mods.t5_buckets(torch.randn(32, H), 20),
    "t5_buckets of the past": score_mods.t5_buckets(torch.randn(32, H), 20, bidirectional=False),
    "tanh_gate": score_mods.tanh_gate(HEAD),
    "temperature": score_mods.temperature(HEAD),
}
CALLS = [*((x, None) for x in SCORES), *((None, x) for x in MASKS), ("relative_table", "tree"), ("alibi", "document")]


def by_flex_attention(score_mod: ScoreMod | None, mask: MaskMod | None, *leaves: Tensor) -> Tensor:
    """Uncompiled, which on a CPU has a backward pass that only the check of devices refuses. In that mode it does not
    look for tensors in closures: its operator gets them as it gets those of a compiled call.
    """
    arguments: dict[str, Any] = {}
    if mask is not None:
        arguments["block_mask"] = flex_attention.create_block_mask(
            lambda b, h, i, j: mask.fn(b, h, i, j, *mask.tensors), B, H, N, N, device="cpu"
        )
    if score_mod is not None:
        arguments["score_mod"] = lambda score, b, h, i, j, *tensors: score_mod.fn(score, b, h, i, j, *tensors)
    operator = functools.partial(flex_attention.flex_attention_hop, score_mod_other_buffers=leaves[3:])
    changed = {"_validate_device": mock.DEFAULT, "flex_attention_hop": operator}
    with mock.patch.multiple(flex_attention, **changed), torch.compiler.set_stance("force_eager"):
        return flex_attention.flex_attention(*leaves[:3], **arguments)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("score", "mask"), CALLS)
def test_results_and_gradients(score: str | None, mask: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(B, H, N, 8, generator=generator) for _ in range(4))
    score_mod, mask_mod = None if score is None else SCORES[score], None if mask is None else MASKS[mask][0]
    tensors = () if score_mod is None else score_mod.tensors

    def results(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.double().requires_grad_() for x in (q, k, v, *tensors)]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout.double())]

    def ours(*leaves: Tensor) -> Tensor:
        mod = None if score_mod is None else ScoreMod(score_mod.fn, leaves[3:])
        return flashtile.attention(*leaves[:3], score_mod=mod, mask=mask_mod, backend="tiled")

    torch.testing.assert_close(results(ours), results(lambda *x: by_flex_attention(score_mod, mask_mod, *x)))
