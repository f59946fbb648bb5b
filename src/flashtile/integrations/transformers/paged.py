"""The attention function of continuous batching, `generate_batch`: packed queries over a cache of pages.

The cache writes the new keys and hands back each sequence's keys, one after another. The function asks for nothing
else of it, and so reads no page itself.
"""

from typing import Any

from torch import Tensor, nn

from ...api.varlen import attention_varlen
from ...errors import ArgumentError

EXAMPLE = "model.set_attn_implementation('tile_attention'); model.generate_batch(inputs)"


def paged_tile_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Any = None,
    block_table: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of one layer in continuous batching.

    Args:
        module: the layer, with `layer_idx`, and `sliding_window` if it has a window.
        query: `[1, Hq, Tq, D]`, the new tokens of all sequences.
        key, value: `[1, Hkv, Tq, D]` and Dv, which go into the cache.
        attention_mask: must be `None`: offsets, causality and the layer's window say what is visible.
        dropout, scaling, softcap, s_aux: as of `tile_attention`.
        cache: transformers' `PagedAttentionCache`.
        cu_seq_lens_q, cu_seq_lens_k: offsets, int32 `[N + 1]`, of the new tokens and of all keys; the latter may be a
            dict by the layer's type.
        block_table: must be `None`.
        others: `read_index` and `write_index` of the cache, and what other implementations read.

    Returns:
        `out [1, Tq, Hq, Dv]`, and `None` for the weights.

    Raises:
        ArgumentError: there is no cache, or there is a mask or a block table.
    """
    if cache is None or cu_seq_lens_q is None:
        accepted = "a PagedAttentionCache with cu_seq_lens_q and cu_seq_lens_k; 'tile_attention' is for other calls"
        raise ArgumentError("cache", cache, accepted, EXAMPLE)
    for name, unsupported in (("attention_mask", attention_mask), ("block_table", block_table)):
        if unsupported is not None:
            raise ArgumentError(name, unsupported, "None in continuous batching", EXAMPLE)
    sliding = getattr(module, "sliding_window", None)
    if isinstance(cu_seq_lens_k, dict):
        cu_seq_lens_k = cu_seq_lens_k["sliding_attention" if sliding else "full_attention"]
    indices = {name: others[name] for name in ("read_index", "write_index")}
    keys, values = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **indices)
    window = (sliding - 1, 0) if sliding else None
    settings = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "dropout_p": dropout}
    q = query.transpose(1, 2).flatten(0, 1)
    out = attention_varlen(q, keys, values, cu_seq_lens_q, cu_seq_lens_k, causal=True, window=window, **settings)
    return out[None], None
