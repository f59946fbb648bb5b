"""Attention of Hugging Face transformers by flashtile, under the name "tile_attention".

    import flashtile.integrations.transformers
    flashtile.integrations.transformers.register()
    model = AutoModel.from_pretrained(name, attn_implementation="tile_attention")

docs/transformers.md has what becomes of masks, caches and other arguments.
"""

from torch import nn

from ..optional import require
from .layers import Report, report_on

__all__ = ["NAME", "absorb", "check", "expand", "register", "unregister"]

NAME = "tile_attention"  # names that contain "flash", "sdpa" or "flex_attention" are treated otherwise by transformers
PAGED = f"paged|{NAME}"  # what continuous batching asks for
VERSIONS = ((5, 0), (6, 0))


def register() -> str:
    """Register flashtile's attention function, and the mask function that belongs to it, as `"tile_attention"`.

    Models take it as `attn_implementation="tile_attention"` when they are made, or by
    `model.set_attn_implementation("tile_attention")`. `check(model)` then says which layers run flashtile: not every
    model asks for an attention function. To register again changes nothing.

    Returns:
        The name, `"tile_attention"`.

    Raises:
        AttentionError: transformers is absent, or not of version 5.
    """
    require("transformers", VERSIONS)
    from transformers import AttentionInterface, AttentionMaskInterface  # pyright: ignore - optional

    from .attention import tile_attention
    from .mask import tile_mask
    from .paged import paged_tile_attention

    AttentionInterface.register(NAME, tile_attention)
    AttentionInterface.register(PAGED, paged_tile_attention)
    AttentionMaskInterface.register(NAME, tile_mask)
    return NAME


def absorb(model: nn.Module) -> int:
    """Let a model with latent attention, as DeepSeek-V2's and V3's, decode over the rows of its cache.

    Its layers keep latent rows, and expand them to the keys and values of all heads at each step. Then few queries
    without gradients have the projections in themselves, and read a row once; others go on as before. It registers
    flashtile and sets the model's attention; `expand(model)` undoes the rest.

    Returns:
        The number of these layers.

    Raises:
        AttentionError: transformers is absent, or not of version 5.
        ArgumentError: the model has no such layer.
    """
    name = register()
    from .latent import absorb_layers  # which needs transformers

    count = absorb_layers(model)
    model.set_attn_implementation(name)  # type: ignore[operator]
    return count


def expand(model: nn.Module) -> None:
    """Let the layers of a model expand their rows again, which `absorb` changed."""
    from .latent import expand_layers

    expand_layers(model)


def check(model: nn.Module) -> Report:
    """Say which attention layers of a model run flashtile, and why the others do not.

    It reads classes and configurations, and runs nothing. Layers that do not call transformers' AttentionInterface are
    found by the word "attention" in the names of their classes.

    Returns:
        A tuple of rows `(layer, kind, runs, reason)`: the layer's name in the model, its class, whether it runs
        flashtile, and why not. Its text has a line for each kind of layer.
    """
    return report_on(model, NAME)


def unregister() -> None:
    """Remove the name. Models that still have it raise an error at their next call."""
    require("transformers", VERSIONS)
    from transformers import AttentionInterface, AttentionMaskInterface  # pyright: ignore - optional

    for interface in (AttentionInterface, AttentionMaskInterface):
        for name in (NAME, PAGED):
            interface._global_mapping.pop(name, None)
