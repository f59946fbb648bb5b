"""Which backends the attention of a model of transformers runs in, by its configuration alone."""

from collections.abc import Iterator
from typing import Any

import torch

from .. import explain
from ..errors import ArgumentError, AttentionError
from ..prebuilt.transformers_model import configuration, dtype_of, has_sinks, layers, sizes
from .finding import BROKEN, OK, WARNING, Finding
from .options import CommandError

TOKENS = 2048  # tokens of the prompt
PASSES = {f"prompt of {TOKENS} tokens": TOKENS, f"one token after {TOKENS}": 1}


def examined(name: str) -> Iterator[Finding]:
    """A finding for each kind of layer and each pass.

    Raises:
        CommandError: transformers is not installed, or has no such configuration.
    """
    try:
        config = configuration(name, "flashtile doctor --model path/of/a/model")
    except ArgumentError as error:
        raise CommandError(f"--model: {error}") from error
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


def in_words(config: Any) -> str:
    heads, heads_kv, d, dv = sizes(config)
    values = "" if d == dv else f" with values of {dv}"
    return f"{heads} heads over {heads_kv} of {d}{values}, {dtype_of(config)}".replace("torch.", "")


def tensors(config: Any, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """q, k, v, and sinks where the model has them: nothing reads their memory."""
    heads, heads_kv, d, dv = sizes(config)
    settings: dict[str, Any] = {"dtype": dtype_of(config), "device": device}
    keys = TOKENS if rows > 1 else TOKENS + 1
    shapes = {"q": (1, heads, rows, d), "k": (1, heads_kv, keys, d), "v": (1, heads_kv, keys, dv)}
    found = {name: torch.empty(shape, **settings) for name, shape in shapes.items()}
    if has_sinks(config):
        found["sinks"] = torch.empty(heads, **settings)
    return found
