"""Which backends the attention of a model of transformers runs in, by its configuration alone."""

from collections.abc import Iterator
from typing import Any

import torch

from .. import explain
from ..errors import AttentionError
from .finding import BROKEN, OK, WARNING, Finding
from .options import CommandError

TOKENS = 2048  # tokens of the prompt
PASSES = {f"prompt of {TOKENS} tokens": TOKENS, f"one token after {TOKENS}": 1}


def examined(name: str) -> Iterator[Finding]:
    """A finding for each kind of layer and each pass.

    Raises:
        CommandError: transformers is not installed, or has no such configuration.
    """
    config = configuration(name)
    text = config.get_text_config()
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield Finding("model", OK, f"{text.model_type}, {in_words(text)}")
    if takes_functions(config) is False:
        advice = "its own code computes attention; flashtile can replace PyTorch's by flashtile.compat.torch.activate()"
        yield Finding("attention", WARNING, "its classes take no attention functions", advice)
    for kind, settings in layers(text).items():
        for words, rows in PASSES.items():
            try:
                found = explain(**tensors(text, rows, place), causal=True, **settings)
            except AttentionError as error:
                yield Finding(f"{kind}, {words}", BROKEN, str(error).splitlines()[0])
                continue
            backward = f", backward {found.backward}" if rows > 1 else ""
            reasons = "; ".join(f"not {other}: {reason}" for other, reason in found.why_not.items())
            yield Finding(f"{kind}, {words}", OK, f"backend {found.backend}{backward}", reasons)


def configuration(name: str) -> Any:
    try:
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise CommandError("--model needs transformers: pip install 'flashtile[transformers]'") from None
    try:
        return transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(f"--model {name}: {str(error).splitlines()[0]}") from error


def takes_functions(config: Any) -> bool | None:
    """Whether the model's class takes attention functions by name; `None` if its class is not known."""
    from transformers import MODEL_MAPPING  # pyright: ignore[reportMissingImports]

    try:
        found = MODEL_MAPPING[type(config)]
    except KeyError:
        return None
    classes = found if isinstance(found, tuple) else (found,)
    flags = "_supports_attention_backend", "_supports_sdpa"
    return all(any(getattr(x, flag, False) for flag in flags) for x in classes)


def sizes(config: Any) -> tuple[int, int, int, int]:
    """Query heads, key heads, head dimensions of keys and of values."""
    heads = config.num_attention_heads
    heads_kv = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "qk_nope_head_dim", None):  # latent attention
        return heads, heads_kv, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, heads_kv, head_dim, head_dim


def in_words(config: Any) -> str:
    heads, heads_kv, d, dv = sizes(config)
    values = "" if d == dv else f" with values of {dv}"
    return f"{heads} heads over {heads_kv} of {d}{values}, {dtype_of(config)}".replace("torch.", "")


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


def tensors(config: Any, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """q, k, v, and sinks where the model has them: nothing reads their memory."""
    heads, heads_kv, d, dv = sizes(config)
    settings: dict[str, Any] = {"dtype": dtype_of(config), "device": device}
    keys = TOKENS if rows > 1 else TOKENS + 1
    shapes = {"q": (1, heads, rows, d), "k": (1, heads_kv, keys, d), "v": (1, heads_kv, keys, dv)}
    found = {name: torch.empty(shape, **settings) for name, shape in shapes.items()}
    if config.model_type == "gpt_oss":
        found["sinks"] = torch.empty(heads, **settings)
    return found
