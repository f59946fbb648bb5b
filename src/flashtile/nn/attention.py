"""The attention layer of a transformer: projections, rotary embeddings, a KV cache."""

from typing import Any

import torch
from torch import Tensor, nn

from ..api.attention import MaskArgument, attention
from ..api.kvcache import attention_with_kvcache
from ..call import sharding
from ..errors import ArgumentError
from .cache import Cache
from .rotary import rotary_tables, rotate, tables_of

MAKE = "flashtile.nn.Attention(512, 8, num_kv_heads=2, causal=True, rotary_dim=64)"
CALL = "layer(x) with x [B, S, embed_dim]"


class Attention(nn.Module):
    """Attention between projections, over a sequence itself, over another one, or over a cache.

    Example:
        >>> layer = flashtile.nn.Attention(64, 4, num_kv_heads=2, causal=True, rotary_dim=16)
        >>> x = torch.randn(2, 10, 64)  # [B, S, embed_dim]
        >>> layer(x).square().mean().backward()
        >>> cache = layer.new_cache(batch=2, length=128)
        >>> with torch.no_grad():
        ...     prompt, step = layer(x[:, :9], cache=cache), layer(x[:, 9:], cache=cache)
        >>> torch.allclose(torch.cat([prompt, step], dim=1), layer(x), atol=1e-5)
        True

    Args:
        embed_dim: features of a token.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of num_heads; `None` is num_heads.
        head_dim: features of a head; `embed_dim // num_heads` if `None`.
        causal: hide later tokens, as the argument of `flashtile.attention`.
        window: `(left, right)`, as the argument of `flashtile.attention`.
        softcap: as the argument of `flashtile.attention`.
        sinks: learn a sink for each query head, which begins with 0.
        dropout_p: the probability of dropping a weight in training mode.
        rotary_dim: features of a head that are turned by their position; 0 is none. Even, at most head_dim.
        rotary_base: the longest wavelength is about `2 * pi * rotary_base`.
        bias: projections have a bias.
        device, dtype: the parameters'.

    Raises:
        ArgumentError: the numbers do not fit each other.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        dropout_p: float = 0.0,
        rotary_dim: int = 0,
        rotary_base: float = 10000.0,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ArgumentError("num_kv_heads", num_kv_heads, f"a divisor of {num_heads}, the query heads", MAKE)
        if head_dim is None and embed_dim % num_heads:
            raise ArgumentError("head_dim", head_dim, f"an int, as {embed_dim} / {num_heads} is none", MAKE)
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if rotary_dim % 2 or not 0 <= rotary_dim <= self.head_dim:
            raise ArgumentError("rotary_dim", rotary_dim, f"an even number from 0 to {self.head_dim}", MAKE)
        self.rotary_dim, self.rotary_base = rotary_dim, rotary_base
        self.settings: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap}
        self.dropout_p = dropout_p
        new: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=bias, **new)
        self.k_proj = nn.Linear(embed_dim, self.num_kv_heads * self.head_dim, bias=bias, **new)
        self.v_proj = nn.Linear(embed_dim, self.num_kv_heads * self.head_dim, bias=bias, **new)
        self.out_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias=bias, **new)
        self.sinks = nn.Parameter(torch.zeros(num_heads, **new)) if sinks else None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        cache: Cache | None = None,
        mask: MaskArgument = None,
        attn_bias: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Attend from the tokens `x [B, S, embed_dim]`.

        Args:
            x: tokens that ask.
            context: tokens `[B, Sk, embed_dim]` that are attended to; x itself if `None`. Without rotary embeddings.
            cache: keys and values of earlier tokens; x's are appended, and `cache.lengths` grows. For inference.
            mask, attn_bias: `mask` and `bias` of `flashtile.attention`; with a cache of `attention_with_kvcache`.
            positions: `[S]`, of the tokens in their sequence, for rotary embeddings without a cache; `None` is 0, 1, 2,
                ... Required in `flashtile.distributed.context_parallel`, where the tokens are a part.

        Returns:
            `[B, S, embed_dim]`.

        Raises:
            ArgumentError: a tensor does not fit; `context` with rotary embeddings or with a cache; a cache of another
                dtype than the projected tokens.
            AttentionError: a gradient is requested with a cache.
        """
        if context is not None and (cache is not None or self.rotary_dim):
            accepted = "None with a cache or rotary embeddings: its tokens have no positions among those of x"
            raise ArgumentError("context", context, accepted, CALL)
        source = x if context is None else context
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # [B, H, S, D]
        k, v = (
            project(source).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
            for project in (self.k_proj, self.v_proj)
        )
        dropout_p = self.dropout_p if self.training else 0.0
        more: dict[str, Any] = {"sinks": self.sinks, "mask": mask, "bias": attn_bias, "dropout_p": dropout_p}
        if cache is None:
            if self.rotary_dim:
                cos, sin = self.tables(x, positions)
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            out = attention(q, k, v, **self.settings, **more)
        else:
            if cache.k.dtype != k.dtype and cache.k_descale is None:
                accepted = f"one of {k.dtype}, as the projections are here (torch.autocast counts)"
                raise ArgumentError("cache", cache.k, accepted, f"layer.new_cache(batch, length, dtype={k.dtype})")
            tables = {"rotary_cos": cache.cos, "rotary_sin": cache.sin, "rotary_interleaved": False}
            where = {"cache_seqlens": cache.lengths, "k": k, "v": v}
            where |= {"k_descale": cache.k_descale, "v_descale": cache.v_descale}
            out = attention_with_kvcache(q, cache.k, cache.v, **where, **tables, **self.settings, **more)
            cache.lengths.add_(x.shape[1])
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def tables(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions of the tokens `x [B, S, embed_dim]`."""
        if positions is None and sharding.current() is None:
            return rotary_tables(x.shape[1], self.rotary_dim, self.rotary_base, x.device)
        if positions is None or positions.shape != x.shape[1:2]:
            accepted = f"the positions of {x.shape[1]} tokens; those of a rank are shard(torch.arange(length), mesh, 0)"
            raise ArgumentError("positions", positions, accepted, "layer(x, positions=torch.arange(x.shape[1]))")
        return tables_of(positions.to(x.device), self.rotary_dim, self.rotary_base)

    def new_cache(self, batch: int, length: int, *, dtype: torch.dtype | None = None) -> Cache:
        """An empty cache for `batch` sequences of up to `length` tokens, on the device of the layer.

        Args:
            batch: sequences.
            length: tokens that each has room for.
            dtype: the projected tokens' where the layer is called; `None` is the dtype of the weights, or
                autocast's inside of `torch.autocast`. float8_e4m3fn, float8_e5m2 and int8 have a scale for each token
                and head.
        """
        weight = self.k_proj.weight
        if dtype is None:
            dtype = self.k_proj(weight.new_empty(0, weight.shape[1])).dtype  # under autocast as here
        size = batch, self.num_kv_heads, length, self.head_dim
        k, v = (weight.new_zeros(size, dtype=dtype) for _ in range(2))
        descales: tuple[Tensor | None, Tensor | None] = (None, None)
        if k.element_size() == 1:
            descales = k.new_ones(size[:-1], dtype=torch.float32), k.new_ones(size[:-1], dtype=torch.float32)
        tables: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.rotary_dim:
            tables = rotary_tables(length, self.rotary_dim, self.rotary_base, weight.device)
        return Cache(k, v, torch.zeros(batch, dtype=torch.int32, device=weight.device), *tables, *descales)

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        settings = "".join(f", {name}={value}" for name, value in self.settings.items() if value not in (None, False))
        return heads + settings + f", rotary_dim={self.rotary_dim}" * bool(self.rotary_dim)
