"""Textbook attention: two matrix products with a softmax between them, [B, H, Sq, Sk] in the inputs' dtype."""

import torch
from torch import Tensor

from ...testing.case import Case
from .provider import (
    Prepared,
    Provider,
    added_by_score_mod,
    from_autograd,
    group_of,
    relative_position,
    require,
    require_free_memory,
    softmax_scale,
    visible_pairs,
)

TAKES = {
    "causal",
    "window",
    "softcap",
    "bias",
    "mask",
    "alibi_slopes",
    "score_mod",
    "sinks",
    "dropout",
    "grouped heads",
}
TAKES |= {"Dv other than D"}


class Plain(Provider):
    name = "plain"

    def prepare(self, case: Case, decode: bool = False) -> Prepared:
        require(case, "plain attention", TAKES)
        require_free_memory(case, 5 if case.differentiates else 3, "score matrices")
        arguments, scale, group = case.arguments, softmax_scale(case), group_of(case)
        visible, sinks = visible_pairs(case), arguments.get("sinks")
        added = arguments.get("bias")
        if arguments.get("alibi_slopes") is not None:
            q, k = arguments["q"], arguments["k"]
            distance = relative_position(q.shape[2], k.shape[2], q.device).abs()
            slopes = (-arguments["alibi_slopes"][:, None, None] * distance).to(q.dtype)  # [H, Sq, Sk]
            added = slopes if added is None else added + slopes

        if arguments.get("score_mod") is not None:
            terms = added_by_score_mod(case)
            added = terms if added is None else added + terms

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if group > 1:
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            s = (q * scale) @ k.mT  # [B, H, Sq, Sk]
            if arguments.get("softcap"):
                s = arguments["softcap"] * torch.tanh(s / arguments["softcap"])
            if added is not None:
                s = s + added
            if visible is not None:
                s = s.masked_fill(~visible, -torch.inf)
            if arguments.get("mask") is not None:
                s = s.masked_fill(~arguments["mask"], -torch.inf)
            if sinks is not None:
                column = sinks[None, :, None, None].expand(*s.shape[:3], 1)
                p = torch.softmax(torch.cat([s, column], 3), 3)[..., :-1]
            else:
                p = torch.softmax(s, 3)
            return torch.dropout(p, arguments.get("dropout_p", 0.0), True) @ v if arguments.get("dropout_p") else p @ v

        return from_autograd(attend, case)
