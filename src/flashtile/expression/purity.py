"""What a score_mod may do and return, found out before any backend runs it, so that all of them refuse the same.

Backward runs the function again, on other tiles than forward. So it may draw no random numbers, and it may write into
nothing that it has not made itself.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, AttentionError, describe
from ..private_torch import TorchDispatchMode, storage_of, tree_leaves

EXAMPLE = (
    "flashtile.attention(q, k, v, score_mod=flashtile.ScoreMod("
    "lambda score, b, h, q_idx, k_idx, scale: score * scale[h], (scale,)))"
)
SIGNATURE = "score_mod(score, b, h, q_idx, k_idx, *tensors) -> score, of torch operations on broadcastable tensors"
IN_PLACE = "a function that leaves its arguments as they are: `score = score * 2`, not `score.mul_(2)`; it calls {}"
RANDOM = (
    "a function that gives the same for the same pair again, in backward and on tiles of any size; it calls {}. "
    "Dropout is dropout_p=0.1; other noise is drawn before the call, and read: flashtile.ScoreMod("
    "lambda score, b, h, q_idx, k_idx, noise: score + noise[b, h, q_idx, k_idx], (noise,))"
)


class Watch(TorchDispatchMode):
    """Raise an error where `fn`, which runs in this mode, does what a score_mod may not do."""

    def __init__(self, fn: Callable[..., Any]):
        super().__init__()
        self.fn = fn
        self.made: dict[int, Tensor] = {}  # by storage, which lives as long as its tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ArgumentError("score_mod", self.fn, RANDOM.format(func), EXAMPLE)
        given = {storage_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if any(storage_of(x) not in self.made for x in written(func, args, kwargs)):
            raise ArgumentError("score_mod", self.fn, IN_PLACE.format(func), EXAMPLE)
        results = func(*args, **kwargs)
        for x in tree_leaves(results):
            # A constant, torch.tensor(0.5), appears in `lift_fresh`, which returns it.
            if isinstance(x, Tensor) and (storage_of(x) not in given or func is torch.ops.aten.lift_fresh.default):
                self.made[storage_of(x)] = x
        return results


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes into."""
    arguments = func._schema.arguments
    values = [*zip(arguments, args, strict=False), *((x, kwargs[x.name]) for x in arguments if x.name in kwargs)]
    changed = [value for x, value in values if x.alias_info is not None and x.alias_info.is_write]
    return [x for x in tree_leaves(changed) if isinstance(x, Tensor)]


def examine(fn: Callable[..., Any], tensors: Iterable[Tensor], device: torch.device) -> None:
    """Run `fn` on a single score.

    Raises:
        ArgumentError: it draws random numbers, works in place, or returns something else than a score.
    """
    score, index, values = sample(tensors, device)
    try:
        with torch.no_grad(), Watch(fn):
            modified = fn(score, index, index, index, index, *values)
    except AttentionError:
        raise
    except Exception:  # the call itself reports what fails on real scores, with their shapes
        return
    reject_result(fn, modified, score)


def sample(tensors: Iterable[Tensor], device: torch.device) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A single score, its index in every dimension, and the function's tensors as it gets them."""
    tensors = list(tensors)
    dtype = torch.float64 if any(x.dtype is torch.float64 for x in tensors) else torch.float32
    index = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
    return index.to(dtype), index, [x.detach().to(dtype) if x.is_floating_point() else x for x in tensors]


def reject_result(fn: Callable[..., Any], modified: Any, score: Tensor) -> None:
    """Whether what `fn` returned for a tile `score [B, H, M, N]` is a new score of each pair."""

    def fail(accepted: str) -> None:
        raise ArgumentError("score_mod", fn, f"{SIGNATURE}{accepted}", EXAMPLE)

    if not isinstance(modified, Tensor):
        fail(f"; it returned {type(modified).__name__}")
    if modified.layout is not torch.strided or modified.device != score.device or modified.is_complex():
        fail(f", real and strided on {score.device}; it returned {describe(modified)}")
    if modified.dtype is torch.bool:
        fail(", floating point: `torch.where(condition, score, -torch.inf)`; it returned a condition, of bool")
    if not modified.is_floating_point():
        fail(f", floating point: `x.to(score.dtype)`; it returned {describe(modified)}")
    if modified.dim() == 0:
        fail(", of each pair: `torch.full_like(score, x)`; it returned one number, without dimensions")
    try:
        fits = torch.broadcast_shapes(modified.shape, score.shape) == score.shape
    except RuntimeError:
        fits = False
    if not fits:
        fail(f"; for a score {list(score.shape)} it returned {list(modified.shape)}")
