"""Tiny models of transformers with random weights, large enough that attention decides their outputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flashtile.integrations.transformers import check
from flashtile.integrations.transformers.layers import OWN

VOCABULARY = 61
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
TEXT = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0}
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
ROUTED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
# As in the published models: 256 features in layers with a window, and 512 in the others, whose keys are values.
WIDE = {"head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}

# Causal language models: the class, its configuration, and its arguments.
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 5}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | MIXED | {"attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | MIXED),
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", GROUPED | MIXED | WIDE | PER_LAYER),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", GROUPED | MIXED | EXPERTS),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    "phi": ("PhiForCausalLM", "PhiConfig", TEXT),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        GROUPED
        | EXPERTS
        | {
            "attention_chunk_size": 5,
            "intermediate_size_mlp": 32,
            "no_rope_layers": [1, 0],
            "interleave_moe_layer_step": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        TEXT | LATENT | ROUTED | {"num_key_value_heads": 4, "first_k_dense_replace": 1},
    ),
}

SPEECH = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 128,
    "decoder_start_token_id": 2,
    "begin_suppress_tokens": None,
    "suppress_tokens": None,
    "bos_token_id": 1,
    "eos_token_id": None,
} | {x: TEXT[x] for x in ("vocab_size", "pad_token_id")}
SEQ2SEQ = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
PICTURE = SIZES | {"image_size": 24, "patch_size": 8}
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", TEXT),
    "t5": ("T5ForConditionalGeneration", "T5Config", SEQ2SEQ | {"vocab_size": VOCABULARY, "pad_token_id": 0}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", SPEECH),
    "vit": ("ViTModel", "ViTConfig", PICTURE),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": TEXT | {"eos_token_id": 1}, "vision_config": PICTURE, "projection_dim": 16},
    ),
}
# Text and pictures: tokens of a picture see each other.
SEEING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"text_config": GROUPED | MIXED, "vision_config": PICTURE, "mm_tokens_per_image": 4, "image_token_index": 60},
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        {
            "text_config": GROUPED | {"model_type": "gemma"},
            "vision_config": PICTURE | {"model_type": "siglip_vision_model", "projection_dim": 32},
            "image_token_index": 60,
            "projection_dim": 32,
        },
    ),
}


def randomize(model: nn.Module) -> nn.Module:
    """Draw weights that keep the size of activations, so that scores differ by about 1 and each layer counts."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 25
        parameter.data = noise * fan_in**-0.5 + (1 if parameter.dim() == 1 else 0)
    return model.eval()


def make(model: str, config: str, arguments: dict[str, Any]) -> Any:
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, config)(**arguments, attn_implementation="eager")
    return randomize(getattr(transformers, model)(settings))


def tiny(name: str) -> Any:
    """One of the models above."""
    return make(*(DECODERS | OTHERS)[name])


def seeing(name: str) -> Any:
    """A model of text and pictures."""
    return make(*SEEING[name])


def padded(batch: int, length: int, left: int = 0, right: int = 0) -> Tensor:
    """A mask `[batch, length]` that hides tokens of the last row."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, :left] = 0
    mask[-1, length - right :] = 0
    return mask


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def use(model: nn.Module, implementation: str) -> None:
    """Set it for each part of a model: T5's encoder and decoder have configurations of their own."""
    from transformers import PreTrainedModel

    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation(implementation)


def outputs_and_gradients(
    model: nn.Module, implementation: str, loss: Callable[[Any], Tensor], **inputs: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The tensor that `loss` takes from the outputs, and the parameters' gradients of a random projection of it."""
    use(model, implementation)
    model.zero_grad()
    result = loss(model(**inputs))
    weight = torch.randn(result.shape, generator=torch.Generator().manual_seed(2))
    (result * weight).sum().backward()
    return result.detach(), {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def compare(model: nn.Module, loss: Callable[[Any], Tensor], **inputs: Any) -> None:
    """Assert that "tile_attention" gives the outputs and gradients of "eager"."""
    expected, gradients = outputs_and_gradients(model, "eager", loss, **inputs)
    found, ours = outputs_and_gradients(model, "tile_attention", loss, **inputs)
    report = check(model)
    assert any(row.runs for row in report), str(report)
    assert all(row.runs or row.reason == OWN for row in report), str(report)
    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert ours.keys() == gradients.keys()
    largest = max(float(x.abs().max()) for x in gradients.values())
    for name, gradient in gradients.items():  # that of a key's bias is rounding alone
        atol = 3e-4 * float(gradient.abs().max()) + 1e-6 * largest
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
