"""PyTorch's names for attention, computed by flashtile: `scaled_dot_product_attention`, `varlen_attn`,
`flex_attention`.

The functions are for programs that import them from here. `activate` makes PyTorch's own functions run in flashtile.
"""

from .flex import AuxOutput, flex_attention
from .registration import activate, restore
from .sdpa import scaled_dot_product_attention
from .varlen import AuxRequest, varlen_attn, varlen_attn_out

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "activate",
    "flex_attention",
    "restore",
    "scaled_dot_product_attention",
    "varlen_attn",
    "varlen_attn_out",
]
