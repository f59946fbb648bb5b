"""The attention function of `"tile_attention"`: arguments and masks of transformers as flashtile's."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging  # pyright: ignore - optional

from ... import MaskMod
from ...api import attention as api
from ...errors import ArgumentError
from .cache import attend_stored, is_eight_bit
from .latent import for_latent_rows
from .mask import TileMask
from .offsets import Offsets, attend_packed, is_packed, window_within

logger = logging.get_logger(__name__)
EXAMPLE = "model(input_ids, attention_mask=mask) with a bool or integer mask [B, S], or a mask [B, 1, Sq, Sk]"


@for_latent_rows
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
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, with the arguments that transformers' models pass.

    Args:
        module: the layer; its `is_causal` counts where there is no mask.
        query: `[B, Hq, Sq, D]`.
        key, value: `[B, Hkv, Sk, D]` and Dv, not repeated for groups. A batch of one, of these or of `query`, is that
            of the others.
        attention_mask: a `TileMask`, bool `[B, Hq, Sq, Sk]` with True for visible pairs, floating-point numbers to add
            to the scores, or `None`; each dimension may be 1.
        dropout: probability of dropping a weight.
        scaling: factor of the products; `D ** -0.5` if `None`.
        is_causal: without a mask, hides keys `j > i` from each of several queries.
        position_bias: added to the scores, with a gradient.
        softcap: scores become `softcap * tanh(score / softcap)` before anything is added.
        s_aux: sinks `[Hq]`.
        output_attentions: has no effect but a warning, as with `sdpa`: weights do not exist.
        cu_seq_lens_q, cu_seq_lens_k: offsets of packed sequences in the tokens of the batch, int32 `[N + 1]`: no token
            sees another sequence, also where the mask shows it.
        max_length_q, max_length_k: the longest sequence's queries and keys.
        unused: what other implementations read; windows are in the mask.

    Returns:
        `out [B, Sq, Hq, Dv]`, and `None` for the weights. Rows that see no key are 0, and so may be rows of padding
        tokens under a causal mask.

    Raises:
        ArgumentError: a mask of another kind or shape.
    """
    if output_attentions:
        logger.warning_once("tile_attention returns no attention weights; attn_implementation='eager' does.")
    query, key, value = of_one_batch(query, key, value)
    if s_aux is not None and s_aux.dtype not in (query.dtype, torch.float32):
        s_aux = s_aux.to(torch.promote_types(s_aux.dtype, query.dtype))
    settings = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "dropout_p": dropout}
    bias = position_bias
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        settings["causal"] = "top_left" if causal and query.shape[2] > 1 else False
    elif not isinstance(attention_mask, TileMask | Tensor) or attention_mask.ndim != 4:
        accepted = "None, a bool or floating-point tensor [B, H, Sq, Sk], or what register() makes of a mask [B, S]"
        raise ArgumentError("attention_mask", attention_mask, accepted, EXAMPLE)
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None and not is_packed(attention_mask):
        offsets = Offsets(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        window = window_within(attention_mask)
        if window is not None and bias is None:
            return attend_packed(query, key, value, offsets, window=window, **settings).transpose(1, 2), None
        attention_mask = offsets.restrict(attention_mask, query, key)
    if isinstance(attention_mask, TileMask):
        return by_pattern(query, key, value, attention_mask, bias, settings).transpose(1, 2), None
    if attention_mask is None:
        pass
    elif attention_mask.dtype == torch.bool:
        settings["mask"] = attention_mask
    else:
        bias = attention_mask if bias is None else bias + attention_mask
    return attention(query, key, value, bias=bias, **settings).transpose(1, 2), None


def attention(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    """`flashtile.attention`, of a cache of 8 bits too."""
    if is_eight_bit(key, value):
        return attend_stored(query, key, value, settings)  # pyright: ignore - both are EightBitKeys
    return api.attention(query, key, value, **settings)


def of_one_batch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with a batch of one expanded to the others' batch."""
    batch = max(x.shape[0] for x in tensors)
    return tuple(x.expand(batch, -1, -1, -1) if x.shape[0] == 1 < batch else x for x in tensors)


def by_pattern(
    query: Tensor, key: Tensor, value: Tensor, mask: TileMask, bias: Tensor | None, settings: dict[str, Any]
) -> Tensor:
    """Attention under a mask of a known pattern or function: `[B, Hq, Sq, Dv]`."""
    batch, _, rows, keys = mask.shape
    if rows not in (1, query.shape[2]) or keys != key.shape[2]:
        accepted = f"a mask of {query.shape[2]} queries and {key.shape[2]} keys"
        raise ArgumentError("attention_mask", mask, accepted, EXAMPLE)
    if (batch, rows) != (query.shape[0], query.shape[2]):  # one for all
        return attention(query, key, value, mask=mask.dense(), bias=bias, **settings)
    pattern = mask.pattern
    if pattern is None:
        return attention(query, key, value, mask=as_function(mask, query), bias=bias, **settings)
    apart = pattern.chunk is not None or pattern.packed is not None or pattern.padding is not None
    apart = apart and not is_eight_bit(key, value)  # which are not packed
    if apart and bias is None and not torch.compiler.is_compiling():  # segments are read back
        segments = mask.segments()
        if segments is not None:
            cu_seqlens_q, cu_seqlens_k, seqused_k, *longest = segments
            offsets = Offsets(cu_seqlens_q, cu_seqlens_k, *longest)
            window = (pattern.left, pattern.right)
            return attend_packed(query, key, value, offsets, seqused_k=seqused_k, window=window, **settings)
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
    """The mask as a MaskMod; dense for one query, for another device, and if it has no formula."""
    if query.shape[2] == 1:
        return mask.dense()
    mod = mask.mod()
    elsewhere = mod is None or any(x.device != query.device for x in mod.tensors)
    return mask.dense() if mod is None or elsewhere else mod
