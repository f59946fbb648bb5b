"""Encoders and decoders whose sources are padded and as long as their targets, against "eager"."""

from typing import Any

import pytest

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs the extra `transformers`")

from tiny_models import GROUPED, VOCABULARY, compare, make, padded, tokens  # noqa: E402

from flashtile.integrations.transformers import register  # noqa: E402

register()

SIZES = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON = SIZES | HEADS | TOKENS | {"max_position_embeddings": 64, "decoder_start_token_id": 2}
ONE_LAYER = GROUPED | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": COMMON,
    "BigBirdPegasusForConditionalGeneration": COMMON | {"attention_type": "original_full"},
    "BlenderbotForConditionalGeneration": COMMON,
    "BlenderbotSmallForConditionalGeneration": COMMON,
    "M2M100ForConditionalGeneration": COMMON,
    "MarianMTModel": COMMON,
    "MBartForConditionalGeneration": COMMON,
    "NllbMoeForConditionalGeneration": COMMON | {"num_experts": 4, "expert_capacity": 64},
    "PLBartForConditionalGeneration": COMMON,
    "PegasusForConditionalGeneration": COMMON,
    "PegasusXForConditionalGeneration": COMMON | {"block_size": 4, "num_global_tokens": 2},
    "T5GemmaForConditionalGeneration": {
        "encoder": ONE_LAYER,
        "decoder": ONE_LAYER | {"cross_attention_hidden_size": 32},
        "vocab_size": VOCABULARY,
    },
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equal_lengths(name: str) -> None:
    """All tokens of the target count, also those at the places of the source's padding; then some are padded too."""
    config = getattr(transformers, name).config_class.__name__
    model = make(name, config, ARCHITECTURES[name])
    target = padded(2, 9, right=2).flip(0)
    for side, more in (("left", {}), ("right", {"decoder_attention_mask": target})):
        inputs = {"input_ids": tokens(2, 9), "attention_mask": padded(2, 9, **{side: 4})}
        inputs["decoder_input_ids"] = tokens(2, 9, seed=1)
        compare(model, lambda out, more=more: out.logits[target.bool()] if more else out.logits, **inputs, **more)
