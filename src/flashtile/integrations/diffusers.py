"""Attention of Hugging Face diffusers by flashtile, inside a `with` block.

diffusers has two ways to PyTorch's attention: the backend "native" of its registry, and calls of
`F.scaled_dot_product_attention` in modules that are older than the registry.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional

from ..compat.torch.sdpa import scaled_dot_product_attention
from ..errors import ArgumentError, AttentionError
from .optional import require

__all__ = ["tile_attention"]

VERSIONS = ((0, 36), (1, 0))
EXAMPLE = "with flashtile.integrations.diffusers.tile_attention(): pipeline(prompt)"


class Functional:
    """`torch.nn.functional` with another `scaled_dot_product_attention`."""

    scaled_dot_product_attention = staticmethod(scaled_dot_product_attention)

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)


@contextmanager
def tile_attention() -> Iterator[None]:
    """Route the native attention of diffusers through flashtile, until the end of the block.

    Models that have another backend set (`set_attention_backend("flash")`) keep it. The change is for all threads, and
    for the modules of diffusers that are imported at the beginning of the block: load the pipeline before it.

    Raises:
        AttentionError: diffusers is absent, or of a version whose native attention is not known.
    """
    require("diffusers", VERSIONS)
    from diffusers.models import attention_dispatch  # pyright: ignore - optional

    try:
        backends = attention_dispatch._AttentionBackendRegistry._backends
        native = attention_dispatch.AttentionBackendName.NATIVE
        before = backends[native]
    except (AttributeError, KeyError) as missing:
        raise AttentionError(
            f"This version of diffusers has no native attention where flashtile looks for it: {missing}.\n"
            "  accepted: a version with diffusers.models.attention_dispatch\n"
            "  a command that helps: pip install diffusers==0.42.1"
        ) from None
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("diffusers.") and vars(module).get("F") is functional
    ]
    proxy = Functional()
    try:
        backends[native] = native_attention
        for module in modules:
            module.F = proxy  # type: ignore[attr-defined]
        yield
    finally:
        backends[native] = before
        for module in modules:
            module.F = functional  # type: ignore[attr-defined]


def native_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Attention over `[B, S, H, D]` with the arguments of the backend "native"; a mask may be `[B, Sk]`."""
    if return_lse:
        raise ArgumentError("return_lse", return_lse, "False, as for the native backend", EXAMPLE)
    if _parallel_config is not None:
        raise ArgumentError("parallel_config", _parallel_config, "None: there is no context parallelism", EXAMPLE)
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return out.transpose(1, 2)
