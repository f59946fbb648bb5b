"""`flash_attn.bert_padding`: padded batches as packed tokens, and back. Differentiable."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...errors import AttentionError

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "rearrange", "unpad_input"]


def absent(*_: Any, **__: Any) -> Any:
    raise AttentionError("rearrange is einops', which is not installed.\n  a command that helps: pip install einops")


try:  # programs import it from here, where flash_attn has it for its own use
    rearrange = import_module("einops").rearrange
except ImportError:
    rearrange = absent


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:  # noqa: A002 - the original's name
    """Rows `indices [N]`, int32 or int64, of `input [M, ...]`, which are `[N, ...]`."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse of `index_first_axis`: `values [N, ...]` at rows `indices [N]` of zeros `[first_axis_dim, ...]`."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Any, Tensor]:
    """Tokens of a padded batch, one sequence after another. Reads two numbers back from the device.

    Args:
        hidden_states: `[B, S, ...]`.
        attention_mask: bool or integers `[B, S]`, 1 for a token and 0 for padding.
        unused_mask: the same, 1 for a place that is kept although it holds no token.

    Returns:
        Tokens `[T, ...]`, their int64 indices `[T]` in the flattened batch, int32 `cu_seqlens [B + 1]`, the longest
        sequence as an int, and int32 `[B]`, the tokens of each sequence without the unused ones.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(lengths.max()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: tokens `[T, ...]` at `indices [T]` of a batch `[batch, seqlen, ...]` of zeros."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
