"""FlexAttention, compiled: `torch.nn.attention.flex_attention` with the case's features as its functions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch

from ...testing.case import Case
from .provider import (
    Declined,
    Prepared,
    Provider,
    effective_window,
    features,
    from_autograd,
    group_of,
    require,
)

TAKES = {
    "causal",
    "window",
    "softcap",
    "bias",
    "mask",
    "alibi_slopes",
    "score_mod",
    "grouped heads",
    "packed sequences",
}
TAKES |= {"Dv other than D"}


class Flex(Provider):
    name = "flex"

    def __init__(self) -> None:
        self.compiled_for: tuple[Any, ...] = ()
        self.attend: Callable[..., Tensor] = no_call

    def prepare(self, case: Case, decode: bool = False) -> Prepared:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        require(case, "FlexAttention", TAKES)
        arguments, device = case.arguments, case.arguments["q"].device
        if case.differentiates and device.type == "cpu":
            raise Declined("FlexAttention has no backward on a CPU")
        key = (*(x.shape for x in qkv(case)), case.dtype, device)
        if decode and not features(case) - {"grouped heads"} and self.compiled_for == key:
            return from_autograd(self.attend, case)  # other caches of the same shape
        torch._dynamo.reset()  # one call of one shape each time must not count as recompilations
        settings = {"donated_buffer": False}  # the graph is kept, to run backward more than once
        packed = case.function == "attention_varlen"
        mask_mod, score_mod = mask_of(case), score_of(case)
        batch, seqlen_q, seqlen_k = dense_shape(case)
        block_mask = None
        if mask_mod is not None:
            mask = arguments.get("mask")
            mask_batch = batch if mask is not None and mask.shape[0] > 1 else None
            block_mask = create_block_mask(
                mask_mod, mask_batch, None, seqlen_q, seqlen_k, device=device, _compile=device.type == "cuda"
            )
        compiled = torch.compile(flex_attention, dynamic=False)
        keywords = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": group_of(case) > 1}

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if packed:
                q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out: Any = compiled(q, k, v, **keywords)
            return out[0].transpose(0, 1) if packed else out

        with functorch.patch(settings), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            attend(*(x.requires_grad_(case.differentiates) for x in map(Tensor.detach, qkv(case))))  # compiles
        self.compiled_for, self.attend = key, attend
        return from_autograd(attend, case)


def no_call(*_: Tensor) -> Tensor:
    raise RuntimeError("nothing is compiled")


def qkv(case: Case) -> list[Tensor]:
    return [case.arguments[name] for name in ("q", "k", "v")]


def dense_shape(case: Case) -> tuple[int, int, int]:
    """B, Sq, Sk; packed sequences are one long one."""
    q, k = case.arguments["q"], case.arguments["k"]
    return (1, q.shape[0], k.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], k.shape[2])


def mask_of(case: Case) -> Callable[..., Tensor] | None:
    """Which pairs are visible, as a function of indices; `None` if all are."""
    left, right = effective_window(case)
    _, seqlen_q, seqlen_k = dense_shape(case)
    diagonal = seqlen_k - seqlen_q
    conditions: list[Callable[..., Tensor]] = []
    if left >= 0:
        conditions.append(lambda b, h, i, j: i + diagonal - j <= left)
    if right >= 0 and seqlen_q > 1:
        conditions.append(lambda b, h, i, j: i + diagonal - j >= -right)
    if case.function == "attention_varlen":
        starts = case.arguments["cu_seqlens_q"]
        positions = torch.arange(seqlen_q, device=starts.device)
        document = torch.searchsorted(starts[1:].long(), positions, right=True)
        conditions.append(lambda b, h, i, j: document[i] == document[j])
    mask = case.arguments.get("mask")
    if mask is not None:
        by_sequence, by_row = (int(n > 1) for n in (mask.shape[0], mask.shape[2]))
        conditions.append(lambda b, h, i, j: mask[b * by_sequence, 0, i * by_row, j])
    if not conditions:
        return None

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        shown = conditions[0](b, h, i, j)
        for condition in conditions[1:]:
            shown = shown & condition(b, h, i, j)
        return shown

    return visible


def score_of(case: Case) -> Callable[..., Tensor] | None:
    """softcap, bias, ALiBi and score_mod as a function of the score; `None` if there is none of them."""
    arguments = case.arguments
    softcap, bias, slopes = (arguments.get(name) for name in ("softcap", "bias", "alibi_slopes"))
    score_mod = arguments.get("score_mod")
    if softcap is None and bias is None and slopes is None and score_mod is None:
        return None
    _, seqlen_q, seqlen_k = dense_shape(case)
    diagonal = seqlen_k - seqlen_q

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if bias is not None:
            s = s + bias[0, h, i, j]
        if slopes is not None:
            s = s - slopes[h] * (i + diagonal - j).abs()
        if score_mod is not None:
            s = score_mod.fn(s, b, h, i, j, *score_mod.tensors)
        return s

    return score
