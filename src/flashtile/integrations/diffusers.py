"""Attention of Hugging Face diffusers by flashtile, inside a `with` block or from `register` to `unregister`.

diffusers has two ways to PyTorch's attention: the backend "native" of its registry, and calls of
`F.scaled_dot_product_attention` in modules that are older than the registry.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional

from ..compat.torch.sdpa import scaled_dot_product_attention
from ..errors import ArgumentError, AttentionError
from .optional import require

__all__ = ["register", "tile_attention", "unregister"]

VERSIONS = ((0, 36), (1, 0))
EXAMPLE = "with flashtile.integrations.diffusers.tile_attention(): pipeline(prompt)"


class Functional:
    """`torch.nn.functional` with another `scaled_dot_product_attention`."""

    scaled_dot_product_attention = staticmethod(scaled_dot_product_attention)

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)


def register() -> None:
    """Route the native attention of diffusers through flashtile, until `unregister()`.

    For training with gradient checkpointing, whose backward pass runs attention again. Otherwise as `tile_attention`.
    To register again is for modules of diffusers that have been imported since, and else changes nothing.

    Raises:
        AttentionError: diffusers is absent, or of a version whose native attention is not known.
    """
    route(register)


def unregister() -> None:
    """Give diffusers its native attention back, where no `tile_attention` block is open at its end."""
    release(register)


@contextmanager
def tile_attention() -> Iterator[None]:
    """Route the native attention of diffusers through flashtile, until the end of the block.

    Models that have another backend set (`set_attention_backend("flash")`) keep it. The change is for all threads, and
    for the modules of diffusers that are imported at the beginning of the block: load the pipeline before it.

    Backward may run after the block, unless it runs attention again, as gradient checkpointing does: PyTorch raises a
    CheckpointError then, of recomputed values with different metadata. Call backward inside, or use `register()`.

    Raises:
        AttentionError: diffusers is absent, or of a version whose native attention is not known.
    """
    block = object()
    route(block)
    try:
        yield
    finally:
        release(block)


_holders: set[Any] = set()  # who has asked for the route: blocks, and `register`
_restore: list[Callable[[], None]] = []


def route(holder: Any) -> None:
    """Change the registry's native backend and the `F` of modules, for one holder more."""
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
    if before is not native_attention:
        backends[native] = native_attention
        _restore.append(lambda: backends.update({native: before}))
    proxy = Functional()
    for name, module in list(sys.modules.items()):
        if name.startswith("diffusers.") and vars(module).get("F") is functional:
            module.F = proxy  # type: ignore[attr-defined]
            _restore.append(lambda module=module: setattr(module, "F", functional))
    _holders.add(holder)


def release(holder: Any) -> None:
    """Undo all changes after the last holder."""
    _holders.discard(holder)
    while _restore and not _holders:
        _restore.pop()()


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
