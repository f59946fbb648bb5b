"""Names of other libraries for flashtile's functions: `flash_attn`, FlashAttention-3 and -4, PyTorch's SDPA.

Nothing here is imported by `import flashtile`. docs/switching.md has every argument.
"""

from types import ModuleType as _ModuleType

from .installation import install, uninstall

__all__ = ["install", "uninstall"]


def __getattr__(name: str) -> _ModuleType:
    """A module at its first use: `import flashtile` is enough for `flashtile.compat.torch.activate()`."""
    from importlib import import_module

    if name in ("flash_attn", "flash_attn_3", "flash_attn_4", "torch"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
