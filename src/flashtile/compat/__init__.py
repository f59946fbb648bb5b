"""Names of other libraries for flashtile's functions: `flash_attn`, FlashAttention-3 and -4, PyTorch's SDPA.

Nothing here is imported by `import flashtile`. docs/switching.md has every argument.
"""

from .installation import install, uninstall

__all__ = ["install", "uninstall"]
