"""Keys and values that an `Attention` layer keeps between calls."""

from typing import NamedTuple

from torch import Tensor


class Cache(NamedTuple):
    """A layer's cache, written in place by `Attention.forward`; made by `Attention.new_cache`.

    Attributes:
        k, v: `[B, num_kv_heads, length, head_dim]`.
        lengths: int32 `[B]`, tokens that each sequence has. A sequence begins anew where it is set to 0.
        cos, sin: float32 `[length, rotary_dim / 2]`, or `None` without rotary embeddings.
        k_descale, v_descale: float32 `[B, num_kv_heads, length]`, the scales of keys and values of 8 bits, or `None`.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    cos: Tensor | None
    sin: Tensor | None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
