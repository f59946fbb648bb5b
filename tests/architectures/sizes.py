"""Small configurations of any architecture, by the names of their sizes, and inputs by the names of arguments."""

import inspect
import re
from typing import Any

import torch
from torch import Tensor

VOCABULARY, LENGTH, PICTURE = 64, 9, 32

# The first pattern that a name matches as a whole decides; a number in a configuration that none matches is kept.
SIZES: list[tuple[str, Any]] = [
    (r"vocab_size|.*_vocab_size", VOCABULARY),
    (r"(hidden_size|d_model|n_embd|dim|embed_dim|encoder_hidden_size|decoder_hidden_size|embedding_size|width)", 32),
    (r"(text|vision|audio|cross_attention|encoder|decoder|output|projection|out)_(hidden|embed|proj)_?(size|dim)", 32),
    (r"projection_dim|proj_dim|mm_hidden_size|qk_hidden_size|word_embed_proj_dim|emb_dim", 32),
    (r"(moe_|shared_expert_|ffn_|expert_)?intermediate_size|.*ffn_dim|d_ff|ffn_hidden_size|.*mlp_dim|n_inner", 32),
    (r"num_key_value_heads|num_kv_heads|cross_num_key_value_heads", 2),
    (r".*(num_attention_heads|attention_heads|num_heads|n_head|n_heads)", 4),
    (r"head_dim|cross_head_dim|d_kv|attention_head_dim|global_head_dim|swa_head_dim", 8),
    (r"(num_)?(encoder_|decoder_)?(hidden_)?layers|num_hidden_layers|n_layers?|depth|num_layers|num_decoder_layers", 2),
    (r"(q_lora_rank|kv_lora_rank|o_lora_rank)", 16),
    (r"qk_rope_head_dim|v_head_dim|index_head_dim", 8),
    (r"qk_nope_head_dim", 8),
    (r"index_n_heads|o_groups|hc_mult|n_group|num_experts_per_tok|moe_topk|top_k_experts|index_topk", 2),
    (r"topk_group|num_nextn_predict_layers|first_k_dense_replace|n_shared_experts|num_experts_per_token", 1),
    (r"num_local_experts|n_routed_experts|num_experts|moe_num_experts", 4),
    (r"expert_capacity", 64),
    (r"max_position_embeddings|max_source_positions|max_target_positions|n_positions|block_length", 64),
    (r"sliding_window|attention_chunk_size", 5),
    (r"image_size|input_size", PICTURE),
    (r"patch_size", 8),
    (r"num_mel_bins|feature_size|input_feat_per_channel", 16),
    (r"(pad|image|video|audio|boi|eoi)_token_(id|index)", None),
    (r".*token_(id|index)|bos_index|eos_index|pad_index|unk_index", 1),
]


def small(config_class: type[Any], depth: int = 0) -> Any:
    """A configuration with small sizes, parts included, whose attention is "eager".

    Raises:
        Exception: whatever a configuration raises that cannot be made so.
    """
    default = config_class()
    chosen: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        found = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
        if isinstance(value, int) and not isinstance(value, bool) and found is not None:
            chosen[name] = min(value, found) if value > 0 else value
    layers = chosen.get("num_hidden_layers", 2)
    for name, value in default.to_dict().items():
        if isinstance(value, list) and name.endswith(("layer_types", "rope_layers", "layers_block_type")):
            kept = sorted(set(value), key=value.index)[-layers:]
            chosen[name] = (kept * layers)[:layers]
    for name, part in (default.sub_configs if depth < 3 else {}).items():
        value = getattr(default, name, None)
        kind = type(value) if value is not None else part
        if value is not None and hasattr(kind, "to_dict"):
            chosen[name] = small(kind, depth + 1).to_dict()
    return config_class(**chosen, attn_implementation="eager") if depth == 0 else config_class(**chosen)


def inputs_of(model: Any, side: str | None) -> tuple[dict[str, Tensor], Tensor | None]:
    """Arguments of `forward`, with padding of the last row on a side, and its mask `[B, S]` if there is text."""
    names = inspect.signature(model.forward).parameters
    draw = torch.Generator().manual_seed(7)
    config = model.config
    found: dict[str, Tensor] = {}
    mask = None
    if "input_ids" in names:
        found["input_ids"] = torch.randint(3, VOCABULARY - 4, (2, LENGTH), generator=draw)
        if side is not None and "attention_mask" in names:
            mask = torch.ones(2, LENGTH, dtype=torch.long)
            mask[1, slice(0, 4) if side == "left" else slice(LENGTH - 4, None)] = 0
            found["attention_mask"] = mask
    if "decoder_input_ids" in names:
        found["decoder_input_ids"] = torch.randint(3, VOCABULARY - 4, (2, LENGTH), generator=draw)
    if "pixel_values" in names and (
        "input_ids" not in names or names["pixel_values"].default is inspect.Parameter.empty
    ):
        found["pixel_values"] = torch.randn(2, 3, PICTURE, PICTURE, generator=draw)
    if model.main_input_name == "input_values":
        found["input_values"] = torch.randn(2, 1600, generator=draw)
    if model.main_input_name == "input_features":
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", 16)
        frames = 2 * getattr(config, "max_source_positions", 20)
        found["input_features"] = torch.randn(2, bins, frames, generator=draw)
    return found, mask
