"""`flash_attn.layers.rotary`: rotary position embeddings (Su et al., "RoFormer", 2021), in torch operations."""

import torch
from torch import Tensor

from ...arguments import refuse
from ...positions import rotate, token_positions

EXAMPLE = "apply_rotary_emb(x, cos, sin)  # x [B, S, H, D], cos and sin [S_rotary, rotary_dim / 2]"

XPOS_OFFSET = 0.4  # gamma in xPos

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first `rotary_dim` features of x by the angles of its positions. Differentiable.

    Args:
        x: `[B, S, H, D]`, or packed `[T, H, D]` with `cu_seqlens`; floating-point.
        cos: `[S_rotary, rotary_dim / 2]`, `rotary_dim <= D`.
        sin: the same.
        interleaved: pairs are features `2n` and `2n + 1`; if False, `n` and `n + rotary_dim / 2`.
        inplace: write into x and return it.
        seqlen_offsets: position of each sequence's first token, an int or integers `[B]`. Positions of a tensor that
            lie behind the tables are not rotated.
        cu_seqlens: integers `[B + 1]`, offsets of packed sequences; needs `max_seqlen`.
        max_seqlen: an int, the longest packed sequence.

    Returns:
        x rotated, computed in float32 (float64 for float64) and rounded to x's dtype.

    Raises:
        ArgumentError: the tables are too short or too wide, or `max_seqlen` is missing.
    """
    if cos.dim() != 2 or sin.shape != cos.shape or 2 * cos.shape[1] > x.shape[-1]:
        refuse("cos", cos, f"[S_rotary, rotary_dim / 2] as sin has, rotary_dim at most {x.shape[-1]}", EXAMPLE)
    if cu_seqlens is not None and max_seqlen is None:
        refuse("max_seqlen", None, "an int with cu_seqlens", EXAMPLE)
    seqlen = x.shape[1] if max_seqlen is None or cu_seqlens is None else max_seqlen
    last = seqlen if isinstance(seqlen_offsets, Tensor) else seqlen + seqlen_offsets
    if last > cos.shape[0]:
        refuse("cos", cos, f"at least {last} positions [S_rotary, rotary_dim / 2]", EXAMPLE)
    if not isinstance(seqlen_offsets, Tensor):
        batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        seqlen_offsets = torch.full((batch,), seqlen_offsets, device=x.device)
    rotated = rotate(x, cos, sin, token_positions(x, seqlen_offsets, cu_seqlens), interleaved)
    return x.copy_(rotated) if inplace else rotated


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k of `qkv [B, S, 3, H, D]` or `[B, S, num_heads_q + 2 * Hkv, D]` in place, and return it.

    Args:
        qkv: queries, keys and values in one tensor.
        cos, sin: tables of `apply_rotary_emb`.
        cos_k, sin_k: tables for k; q's if `None`.
        interleaved: as in `apply_rotary_emb`.
        seqlen_offsets: as in `apply_rotary_emb`.
        num_heads_q: query heads, for four dimensions.

    Raises:
        ArgumentError: `num_heads_q` is missing or not such a number, or the tables do not fit.
    """
    if qkv.dim() == 5:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        if num_heads_q is None or num_heads_q > qkv.shape[2] or (qkv.shape[2] - num_heads_q) % 2:
            accepted = f"an int from 0 such that {qkv.shape[2]} heads are num_heads_q + 2 * Hkv"
            refuse("num_heads_q", num_heads_q, accepted, "apply_rotary_emb_qkv_(qkv, cos, sin, num_heads_q=8)")
        heads = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads]
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(q, cos, sin, interleaved, inplace=True, seqlen_offsets=seqlen_offsets)
    apply_rotary_emb(k, cos_k, sin_k, interleaved, inplace=True, seqlen_offsets=seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate k of `kv [B, S, 2, H, D]` in place, and return it."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, inplace=True, seqlen_offsets=seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotation of queries and keys by their positions, with tables that grow with the sequences.

    Pair `n` of `dim / 2` turns by `position * base ** (-2 * n / dim)`. With `scale_base` it also has xPos' decay (Sun
    et al., "A length-extrapolatable transformer", 2022): queries are multiplied by `decay ** (position / scale_base)`
    and keys divided by it, up to a factor of both.

    Buffers and tables are named as in `flash_attn`, for subclasses and models that read them.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """`dim` are the features that are rotated, at most a head's. `interleaved` is as in
        `apply_rotary_emb`; `scale_base` is a number of positions, usually 512.
        """
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None if scale_base is None else self._compute_scale(device)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _compute_scale(self, device: torch.device | str | None = None) -> Tensor:
        pairs = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
        return (pairs + XPOS_OFFSET) / (1 + XPOS_OFFSET)

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Make the tables of `seqlen` positions, unless there are as many of this device and dtype."""
        cached, enough = self._cos_cached, seqlen <= self._seq_len_cached
        if cached is not None and enough and (cached.device, cached.dtype) == (device, dtype):
            savable = not cached.is_inference()  # for autograd
            if savable or not self.training:
                return
        self._seq_len_cached = seqlen
        # In float32 also where the module was cast: products with large positions would be far off.
        inv_freq = self.inv_freq if self.inv_freq.dtype is torch.float32 else self._compute_inv_freq(device)
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(positions, inv_freq.to(device))
        cos, sin = angles.cos(), angles.sin()
        decay: Tensor | float = 1.0
        if self.scale is not None and self.scale_base is not None:
            scale = self.scale if self.scale.dtype is torch.float32 else self._compute_scale(device)
            decay = scale.to(device) ** ((positions - seqlen // 2) / self.scale_base)[:, None]
            self._cos_k_cached, self._sin_k_cached = (cos / decay).to(dtype), (sin / decay).to(dtype)
        self._cos_cached, self._sin_cached = (cos * decay).to(dtype), (sin * decay).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate queries and keys in place, and return them.

        Args:
            qkv: `[B, S, 3, H, D]`, or `[B, S, num_heads_q + 2 * Hkv, D]`; with `kv` queries `[B, S, H, D]`.
            kv: `[B, S, 2, H, D]` or `None`.
            seqlen_offset: position of each sequence's first token, an int or integers `[B]`.
            max_seqlen: positions that the tables have at least; needed with a tensor of offsets.
            num_heads_q: query heads, for qkv of four dimensions.

        Returns:
            `qkv`, or queries and `kv`.

        Raises:
            ArgumentError: as `apply_rotary_emb_qkv_` does; or there are no tables, and `max_seqlen` is missing.
        """
        if max_seqlen is None and not isinstance(seqlen_offset, Tensor):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            example = "rotary(qkv, seqlen_offset=offsets, max_seqlen=512)"
            refuse("max_seqlen", None, "an int with a tensor of offsets, before there are tables", example)
        of_keys = {"interleaved": self.interleaved, "seqlen_offsets": seqlen_offset}
        if kv is None:
            tables = cos, sin, self._cos_k_cached, self._sin_k_cached
            return apply_rotary_emb_qkv_(qkv, *tables, **of_keys, num_heads_q=num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, inplace=True, **of_keys)
        cos_k, sin_k = self._cos_k_cached, self._sin_k_cached
        return q, apply_rotary_emb_kv_(kv, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, **of_keys)
