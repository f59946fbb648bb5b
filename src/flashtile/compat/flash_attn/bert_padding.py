"""`flash_attn.bert_padding`: padded batches as packed tokens, and back. Differentiable."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...errors import AttentionError

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "rearrange",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def absent(*_: Any, **__: Any) -> Any:
    raise AttentionError("rearrange is einops', which is not installed.\n  a command that helps: pip install einops")


try:  # programs import it from here, where flash_attn has it for its own use
    rearrange = import_module("einops").rearrange
except ImportError:
    rearrange = absent


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:  # noqa: A002 - the original's name
    """Rows `indices [N]`, int32 or int64, of `input [M, ...]`, which are `[N, ...]`."""
    return input.index_select(0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
    """`index_first_axis`, and `input` once more, so that one gradient has both parts."""
    return index_first_axis(input, indices), input.view_as(input)


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
    return *packed(hidden_states, kept, lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Tokens of a padded batch whose rows hold several sequences. Reads numbers back from the device.

    Args:
        hidden_states: `[B, S, ...]`.
        attention_mask_in_length: integers `[B, S]`; the numbers above 0 in a row are the lengths of its sequences,
            which follow one another from the row's start.

    Returns:
        Tokens `[T, ...]`, their int64 indices `[T]` in the flattened batch, int32 `cu_seqlens` of all sequences, and
        the longest one as an int.
    """
    positions = torch.arange(attention_mask_in_length.shape[-1], device=attention_mask_in_length.device)
    kept = positions < attention_mask_in_length.sum(dim=-1, keepdim=True)
    lengths = attention_mask_in_length.flatten()
    return packed(hidden_states, kept, lengths[lengths.nonzero().flatten()])


def packed(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Tokens at the places `kept [B, S]`, their indices, the offsets of their sequences, and the longest one."""
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: tokens `[T, ...]` at `indices [T]` of a batch `[batch, seqlen, ...]` of zeros."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
