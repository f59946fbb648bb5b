"""The attention of a model of transformers, by its configuration alone."""

import os
from collections.abc import Iterator
from typing import Any

import torch

from ..call.record import Record
from ..errors import ArgumentError
from .ranges import records_of_ranges

EXAMPLE = "flashtile.prepare(model='path/of/a/model', training=False)"


def records_of_model(
    model: Any, dtype: torch.dtype | None, settings: dict[str, Any], **ranges: Any
) -> Iterator[Record]:
    """Records of the calls of each kind of layer; `ranges` as `records_of_ranges` takes them.

    Raises:
        ArgumentError: transformers is not installed, or has no such configuration.
    """
    config = configuration(model) if isinstance(model, str | os.PathLike) else model
    if not hasattr(config, "get_text_config"):
        raise ArgumentError("model", model, "a configuration of transformers, or the name or folder of one", EXAMPLE)
    text = config.get_text_config()
    heads, heads_kv, head_dim, head_dim_v = sizes(text)
    kind = {"heads": heads, "heads_kv": heads_kv, "head_dim": head_dim, "head_dim_v": head_dim_v}
    kind |= {"dtype": dtype or dtype_of(text), "layout": "dense", "page_size": None}
    shared = {"causal": is_causal(config), "sinks": has_sinks(text)} | settings
    for of_layer in layers(text).values():
        yield from records_of_ranges(kind, shared | of_layer, **ranges)


def configuration(name: str | os.PathLike[str], example: str = EXAMPLE) -> Any:
    """The configuration of a name or folder; errors show `example`.

    Raises:
        ArgumentError: transformers is not installed, or has no such configuration.
    """
    try:
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ArgumentError(
            "model", name, "with transformers: pip install 'flashtile[transformers]'", example
        ) from None
    try:
        return transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError("model", name, f"a model that transformers knows; {reason}", example) from error


def is_causal(config: Any) -> bool:
    """Whether a query sees earlier keys only: in a model that generates, and not in one that fills in masked words."""
    names = getattr(config, "architectures", None)
    if names:
        return any(name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in names)
    from transformers import (  # pyright: ignore[reportMissingImports]
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
    )

    kind = type(config.get_text_config())
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_MASKED_LM_MAPPING


def has_sinks(config: Any) -> bool:
    return config.model_type == "gpt_oss"


def sizes(config: Any) -> tuple[int, int, int, int]:
    """Query heads, key heads, head dimensions of keys and of values."""
    heads = config.num_attention_heads
    heads_kv = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "qk_nope_head_dim", None):  # latent attention
        return heads, heads_kv, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, heads_kv, head_dim, head_dim


def dtype_of(config: Any) -> torch.dtype:
    named = getattr(config, "dtype", None)
    named = getattr(torch, named) if isinstance(named, str) else named
    return named or torch.float32


def layers(config: Any) -> dict[str, dict[str, Any]]:
    """Settings of `attention` for each kind of layer."""
    shared: dict[str, Any] = {}
    if softcap := getattr(config, "attn_logit_softcapping", None):
        shared["softcap"] = softcap
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = set(getattr(config, "layer_types", None) or (["sliding_attention"] if window else ["full_attention"]))
    found = {}
    if "full_attention" in kinds or not kinds & {"sliding_attention", "chunked_attention"}:
        found["full attention"] = shared
    if "sliding_attention" in kinds and window:
        found[f"window of {window}"] = shared | {"window": (window - 1, 0)}
    if "chunked_attention" in kinds:
        chunk = config.attention_chunk_size
        found[f"chunks of {chunk}"] = shared | {"attention_chunk": chunk}
    return found
