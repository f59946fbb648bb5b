"""Arguments of FlashAttention's interfaces as flashtile's, and the refusal of all that it does not have."""

from collections.abc import Sequence
from operator import index
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import ArgumentError

WindowSize = Sequence[int | None] | Tensor
FP8 = "None with q, or k and v, of 16 bits: descales multiply tensors of 8 bits, q in float8_e4m3fn"
BLOCKS = "None: there is no block sparsity; flashtile.attention has `mask`, `window` and `score_mod`"
MODS = "None: a CuTe function cannot run here; flashtile.ScoreMod takes a function of torch operations"

SELECTED = "None: all keys of a sequence are attended to; gather the rows of others before the call"

# Arguments that flashtile has nothing for, and the way that works.
ACCEPTED = {
    "aux_scalars": MODS,
    "aux_tensors": MODS,
    "block_sparse_tensors": BLOCKS,
    "block_sparse_tensors_bwd": BLOCKS,
    "gather_kv_indices": "None: gather the keys before the call, or hide the others by `mask` of flashtile.attention",
    "k_descale": FP8,
    "mask_mod": "None: a CuTe function cannot run here; flashtile.attention's `mask` takes one of torch operations",
    "min_seqlen_k": "None: it belongs to gather_kv_indices",
    "q_descale": FP8,
    "extra_indices_in_kvcache": SELECTED,
    "extra_k_cache": SELECTED,
    "extra_topk_length": SELECTED,
    "indices": SELECTED,
    "topk_length": SELECTED,
    "qv": "None: concatenate q with qv, and k with v, along the last dimension, and pass `softmax_scale`",
    "score_mod": MODS,
    "score_mod_bwd": MODS,
    "seqused": "None: cut the parts to the rows in use before the call",
    "v_descale": FP8,
    "virtual_batch_idx": "None: index the parts by it before the call",
}


def decline(example: str, **values: Any) -> None:
    """Raise the error for the first argument that is set and has no equivalent. Unset is `None`, 0 or empty."""
    for argument, value in values.items():
        if isinstance(value, Tensor) or value:
            refuse(argument, value, ACCEPTED[argument], example)


def descales_of(
    example: str, q: Tensor, k: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None
) -> dict[str, Any]:
    """Keywords of `flashtile.attention` for scales of tensors of 8 bits; those `[B, Hkv]` are of sequences, which no
    number of pages or tokens makes scales of these. Without any, none: this takes the least time.
    """
    if q_descale is k_descale is v_descale is None:
        return {}
    if k.element_size() > 1:
        decline(example, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if q.element_size() > 1:
        decline(example, q_descale=q_descale)
    if q_descale is not None and q_descale.dim() == 2:
        q_descale = q_descale[:, :, None]
    of_keys = (x[:, None, None] if x is not None and x.dim() == 2 else x for x in (k_descale, v_descale))
    return dict(zip(("q_descale", "k_descale", "v_descale"), (q_descale, *of_keys), strict=True))


def refuse(argument: str, value: Any, accepted: str, example: str) -> NoReturn:
    raise ArgumentError(argument, value, accepted, example)


def window_of(window_size: WindowSize, example: str) -> tuple[int | None, int | None] | None:
    """Convert a `window_size`, in which every negative number is unlimited, to `window`."""
    left, right = sides_of(window_size, "(left, right) of integers, where -1 is unlimited", example)
    left = None if left is not None and left < 0 else left
    right = None if right is not None and right < 0 else right
    return None if left is None and right is None else (left, right)


def sides_of(window_size: WindowSize, accepted: str, example: str) -> tuple[int | None, int | None]:
    """The two sides of a `window_size`, which programs also pass as a tensor, or with tensors of one integer in it."""
    sides = window_size.unbind() if isinstance(window_size, Tensor) and window_size.dim() == 1 else window_size
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        refuse("window_size", window_size, accepted, example)
    if not isinstance(sides[0], Tensor) and not isinstance(sides[1], Tensor):
        return sides[0], sides[1]
    try:
        left, right = (index(x) if isinstance(x, Tensor) else x for x in sides)
    except TypeError:  # more than one number, or not an integer
        refuse("window_size", window_size, accepted, example)
    return left, right


def keywords(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> dict[str, Any]:
    """Keywords of `flashtile.attention` for those that all of FlashAttention-2's functions have. `deterministic=False`
    leaves the choice to `torch.use_deterministic_algorithms`.
    """
    return {
        "dropout_p": dropout_p,
        "scale": softmax_scale,
        "causal": causal,
        "window": window,
        "softcap": above(0, softcap),
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic or None,
    }


def longest_of(max_seqlen: int | Tensor | None) -> int | None:
    """Convert a `max_seqlen`, which programs also pass as a tensor of one integer: FlashAttention reads it back too."""
    one = isinstance(max_seqlen, Tensor) and max_seqlen.dim() == 0 and not max_seqlen.is_floating_point()
    return int(max_seqlen) if one else max_seqlen  # type: ignore[return-value]


def splits_of(num_splits: int | None) -> int | None:
    """Convert `num_splits` of calls without a KV cache, whose default is 1: it and less let the backend choose."""
    return above(1, num_splits)


def above(limit: int, number: Any) -> Any:
    """`None` for a number up to `limit`, which turns a setting off. The call itself judges what is no number."""
    return None if isinstance(number, int | float) and number <= limit else number


def infinite_lse(lse: Tensor) -> Tensor:
    """Convert `lse` to FlashAttention-2's: rows that see no key have +inf."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)
