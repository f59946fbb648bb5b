"""The attention function of `"tile_attention"`: arguments and masks of transformers as those of flashtile."""

from typing import Any

import torch
from torch import Tensor, nn

from ... import MaskMod
from ...api.attention import attention, attention_varlen
from ...errors import ArgumentError
from .mask import TileMask

EXAMPLE = "model(input_ids, attention_mask=mask) with a bool or integer mask [B, S], or a mask [B, 1, Sq, Sk]"


def tile_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = False,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, with the arguments that transformers' models pass.

    Args:
        module: the layer; its `is_causal` counts where there is no mask.
        query: `[B, Hq, Sq, D]`.
        key, value: `[B, Hkv, Sk, D]` and Dv, not repeated for groups.
        attention_mask: a `TileMask`, bool `[B, Hq, Sq, Sk]` with True for visible pairs, floating-point numbers to add
            to the scores, or `None`; each dimension but the last may be 1.
        dropout: probability of dropping a weight.
        scaling: factor of the products; `D ** -0.5` if `None`.
        is_causal: without a mask, hides keys `j > i` from each of several queries.
        position_bias: added to the scores, with a gradient.
        softcap: scores become `softcap * tanh(score / softcap)` before anything is added.
        s_aux: sinks `[Hq]`.
        output_attentions: must not be True: weights do not exist.
        unused: what other implementations read; windows and packed sequences are in the mask.

    Returns:
        `out [B, Sq, Hq, Dv]`, and `None` for the weights. Rows that see no key are 0, and so are those of padding
        tokens.

    Raises:
        ArgumentError: a mask of another kind or shape, or `output_attentions`.
    """
    if output_attentions:
        accepted = "False: weights are not kept; attn_implementation='eager' returns them"
        raise ArgumentError("output_attentions", output_attentions, accepted, EXAMPLE)
    if s_aux is not None and s_aux.dtype not in (query.dtype, torch.float32):
        s_aux = s_aux.to(torch.promote_types(s_aux.dtype, query.dtype))
    settings = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "dropout_p": dropout}
    if isinstance(attention_mask, TileMask):
        return by_pattern(query, key, value, attention_mask, position_bias, settings).transpose(1, 2), None
    bias = position_bias
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        settings["causal"] = "top_left" if causal and query.shape[2] > 1 else False
    elif not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4:
        accepted = "None, a bool or floating-point tensor [B, H, Sq, Sk], or what register() makes of a mask [B, S]"
        raise ArgumentError("attention_mask", attention_mask, accepted, EXAMPLE)
    elif attention_mask.dtype == torch.bool:
        settings["mask"] = attention_mask
    else:
        bias = attention_mask if bias is None else bias + attention_mask
    return attention(query, key, value, bias=bias, **settings).transpose(1, 2), None


def by_pattern(
    query: Tensor, key: Tensor, value: Tensor, mask: TileMask, bias: Tensor | None, settings: dict[str, Any]
) -> Tensor:
    """Attention under a mask of a known pattern or function: `[B, Hq, Sq, Dv]`."""
    rows, keys = mask.shape[2:]
    if (query.shape[2], key.shape[2]) != (rows, keys):
        accepted = f"a mask of {query.shape[2]} queries and {key.shape[2]} keys"
        raise ArgumentError("attention_mask", mask, accepted, EXAMPLE)
    pattern = mask.pattern
    if pattern is None:
        return attention(query, key, value, mask=as_function(mask, query), bias=bias, **settings)
    apart = pattern.chunk is not None or pattern.packed is not None or pattern.padding is not None
    if apart and bias is None and not torch.compiler.is_compiling():  # segments are read back
        segments = mask.segments()
        if segments is not None:
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
            out = attention_varlen(
                q,
                k,
                v,
                segments.cu_seqlens,
                segments.cu_seqlens,
                max_seqlen_q=segments.longest,
                max_seqlen_k=segments.longest,
                seqused_k=segments.seqused_k,
                window=(pattern.left, pattern.right),
                **settings,
            )
            return out.unflatten(0, (query.shape[0], rows)).transpose(1, 2)
    first = mask.q_offset - mask.kv_offset  # the key at the position of the first query
    if pattern.right == 0 and first + rows < keys:  # the rest of a static cache is empty
        keys = first + rows
        key, value = key[:, :, :keys], value[:, :, :keys]
        bias = None if bias is None else bias[..., :keys]
    limited = pattern.left is not None or pattern.right is not None
    aligned = first == keys - rows
    visible: Tensor | MaskMod | None = None
    if pattern.chunk is not None or pattern.packed is not None or (limited and not aligned):
        visible = as_function(mask, query)
        visible = visible[..., :keys] if isinstance(visible, Tensor) else visible
    elif pattern.padding is not None:
        visible = pattern.padding[:, None, None, mask.kv_offset : mask.kv_offset + keys]
    window = (pattern.left, pattern.right) if limited and aligned else None
    return attention(query, key, value, mask=visible, bias=bias, window=window, **settings)


def as_function(mask: TileMask, query: Tensor) -> Tensor | MaskMod:
    """The mask as a MaskMod; dense for one query, for another batch or device, and if it has no formula."""
    if query.shape[2] == 1 or query.shape[0] != mask.shape[0]:
        return mask.dense()
    mod = mask.mod()
    elsewhere = mod is None or any(x.device != query.device for x in mod.tensors)
    return mask.dense() if mod is None or elsewhere else mod
