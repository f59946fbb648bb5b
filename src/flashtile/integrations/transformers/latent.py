"""DeepSeek's latent attention without expanded keys: few queries attend over the rows of the cache as they are.

The models' layers keep latent rows in the cache, and expand all of them to the keys and values of each head at each
step. Here the projection to keys is absorbed into the queries, and that to values into the outputs:

    <q[h], W_k[h] c> = <W_k[h]^T q[h], c>        sum of p W_v[h] c = W_v[h] (sum of p c)
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...api.latent import rows_of_both
from ...errors import ArgumentError

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
NEEDED = (*SIZES, "kv_b_proj", "expand_kv")
ABSORBED = "absorbed_by_flashtile"


def absorb_layers(model: nn.Module) -> int:
    """Give a model's latent layers rows for keys and values; their number.

    Raises:
        ArgumentError: there are none.
    """
    layers: list[Any] = [x for x in model.modules() if all(hasattr(x, name) for name in NEEDED)]
    if not layers:
        accepted = "a model with latent attention of transformers: DeepSeek-V2, DeepSeek-V3 or one of their kind"
        raise ArgumentError("model", type(model).__name__, accepted, "absorb(DeepseekV3ForCausalLM(config))")
    for layer in layers:
        setattr(layer, ABSORBED, True)
        layer.expand_kv = rows_of_cache
    return len(layers)


def expand_layers(model: nn.Module) -> None:
    """Undo `absorb_layers`."""
    for layer in model.modules():
        if layer.__dict__.pop(ABSORBED, False):
            del layer.expand_kv


def rows_of_cache(latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `[B, 1, S, rank + rope]` and their first columns, in place of keys and values. Parts of one tensor are not
    copied.
    """
    joined = rows_of_both(rope, latent)
    rows = torch.cat((latent, rope), -1) if joined is None else joined
    return rows, rows[..., : latent.shape[-1]]


def for_latent_rows(attend: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """An attention function that takes rows of latent layers, too: few queries are absorbed, and for many, or with
    gradients, the layer expands the rows.
    """

    @functools.wraps(attend)
    def attend_to_rows(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any
    ) -> tuple[Tensor, None]:
        if not getattr(module, ABSORBED, False):
            return attend(module, query, key, value, *others, **more)
        if torch.is_grad_enabled() or not few_enough(module, query.shape[2]):
            return attend(module, query, *heads_of(module, key), *others, **more)
        out, _ = attend(module, absorbed_queries(module, query), key, value, *others, **more)
        return outputs_of_heads(module, out), None

    return attend_to_rows


def few_enough(layer: Any, queries: int) -> bool:
    """Whether products with latent rows take fewer operations than expanding a key and products with its heads: of each
    query and head, the rows' widths instead of the heads', and no expansion of the key.
    """
    rank, nope, rope, v_dim = (getattr(layer, name) for name in SIZES)
    return queries * ((rank + rope + rank) - (nope + rope + v_dim)) < rank * (nope + v_dim)


def heads_of(layer: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Keys `[B, H, S, nope + rope]` and values of all heads, as the layer itself expands its rows."""
    rank = layer.kv_lora_rank
    return type(layer).expand_kv(layer, rows[..., :rank], rows[..., rank:])


def projections(layer: Any) -> tuple[Tensor, Tensor]:
    """`W_k [H, nope, rank]` and `W_v [H, v_dim, rank]`."""
    rank, nope, _, v_dim = (getattr(layer, name) for name in SIZES)
    both = layer.kv_b_proj.weight.view(-1, nope + v_dim, rank)
    return both[:, :nope], both[:, nope:]


def absorbed_queries(layer: Any, query: Tensor) -> Tensor:
    """Queries of heads `[B, H, Sq, nope + rope]` as queries of rows, `[B, H, Sq, rank + rope]`."""
    nope = layer.qk_nope_head_dim
    return torch.cat((query[..., :nope] @ projections(layer)[0], query[..., nope:]), -1)


def outputs_of_heads(layer: Any, out: Tensor) -> Tensor:
    """Outputs from rows `[B, Sq, H, rank]` as outputs of heads, `[B, Sq, H, v_dim]`."""
    values = projections(layer)[1]
    return (out.transpose(1, 2) @ values.transpose(1, 2)).transpose(1, 2)
