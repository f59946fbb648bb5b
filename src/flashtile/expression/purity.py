"""Checks of score_mod and mask functions before any backend runs them, so that all backends refuse the same.

Backward runs the function again, on other tiles than forward. So it may draw no random numbers, and it may write into
nothing that it has not made itself.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, AttentionError, describe
from ..private_torch import TorchDispatchMode, storage_of, tree_leaves


class Role(NamedTuple):
    """An argument that takes a function of pairs: the names and examples of its errors."""

    argument: str
    owner: str  # class of its values
    hides: bool  # whether the function returns if a pair is visible, not a new score
    signature: str
    example: str  # a call that works
    new_value: str  # in place of writing into an argument
    noise: str  # read from a tensor


SCORE_MOD = Role(
    argument="score_mod",
    owner="ScoreMod",
    hides=False,
    signature="score_mod(score, b, h, q_idx, k_idx, *tensors) -> score, of torch operations on broadcastable tensors",
    example="flashtile.attention(q, k, v, score_mod=flashtile.ScoreMod("
    "lambda score, b, h, q_idx, k_idx, scale: score * scale[h], (scale,)))",
    new_value="`score = score * 2`, not `score.mul_(2)`",
    noise="flashtile.ScoreMod(lambda score, b, h, q_idx, k_idx, noise: score + noise[b, h, q_idx, k_idx], (noise,))",
)
MASK_MOD = Role(
    argument="mask",
    owner="MaskMod",
    hides=True,
    signature="mask_mod(b, h, q_idx, k_idx, *tensors) -> bool, of torch operations on broadcastable tensors",
    example="flashtile.attention(q, k, v, mask=flashtile.MaskMod("
    "lambda b, h, q_idx, k_idx, lengths: k_idx < lengths[b], (lengths,)))",
    new_value="`k_idx + 1`, not `k_idx.add_(1)`",
    noise="flashtile.MaskMod(lambda b, h, q_idx, k_idx, kept: kept[b, h, q_idx, k_idx], (kept,))",
)
IN_PLACE = "a function that leaves its arguments as they are: {}; it calls {}"
RANDOM = (
    "a function that gives the same for the same pair again, in backward and on tiles of any size; it calls {}. "
    "Dropout is dropout_p=0.1; other noise is drawn before the call, and read: {}"
)


class Watch(TorchDispatchMode):
    """Raise an error where `fn`, which runs in this mode, does what a score_mod or mask function may not do."""

    def __init__(self, fn: Callable[..., Any], role: Role):
        super().__init__()
        self.fn, self.role = fn, role
        self.made: dict[int, Tensor] = {}  # by storage, which lives as long as its tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.fail(RANDOM.format(func, self.role.noise))
        given = {storage_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if any(storage_of(x) not in self.made for x in written(func, args, kwargs)):
            self.fail(IN_PLACE.format(self.role.new_value, func))
        results = func(*args, **kwargs)
        for x in tree_leaves(results):
            # A constant, torch.tensor(0.5), appears in `lift_fresh`, which returns it.
            if isinstance(x, Tensor) and (storage_of(x) not in given or func is torch.ops.aten.lift_fresh.default):
                self.made[storage_of(x)] = x
        return results

    def fail(self, accepted: str) -> None:
        raise ArgumentError(self.role.argument, self.fn, accepted, self.role.example)


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes into."""
    arguments = func._schema.arguments
    values = [*zip(arguments, args, strict=False), *((x, kwargs[x.name]) for x in arguments if x.name in kwargs)]
    changed = [value for x, value in values if x.alias_info is not None and x.alias_info.is_write]
    return [x for x in tree_leaves(changed) if isinstance(x, Tensor)]


def examine(fn: Callable[..., Any], tensors: Iterable[Tensor], device: torch.device, role: Role) -> None:
    """Run `fn` on a single pair.

    Raises:
        ArgumentError: it draws random numbers, works in place, or returns something else than its argument takes.
    """
    score, index, values = sample(tensors, device)
    try:
        with torch.no_grad(), Watch(fn, role):
            result = fn(*[] if role.hides else [score], index, index, index, index, *values)
    except AttentionError:
        raise
    except Exception:  # the call itself reports what fails on real scores, with their shapes
        return
    reject_result(fn, result, score.shape, score.device, role)


def sample(tensors: Iterable[Tensor], device: torch.device) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A single score, its index in every dimension, and the function's tensors as it gets them."""
    tensors = list(tensors)
    dtype = torch.float64 if any(x.dtype is torch.float64 for x in tensors) else torch.float32
    index = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
    return index.to(dtype), index, [x.detach().to(dtype) if x.is_floating_point() else x for x in tensors]


def reject_result(
    fn: Callable[..., Any], result: Any, shape: tuple[int, ...], device: torch.device, role: Role
) -> None:
    """Whether `fn` returned a new score of each pair of a tile `[B, H, M, N]`, or whether it is visible."""

    def fail(accepted: str) -> None:
        raise ArgumentError(role.argument, fn, f"{role.signature}{accepted}", role.example)

    if not isinstance(result, Tensor):
        fail(f"; it returned {type(result).__name__}")
    if result.layout is not torch.strided or result.device != device or result.is_complex():
        fail(f", real and strided on {device}; it returned {describe(result)}")
    if role.hides:
        if result.dtype is not torch.bool:
            fail(f", a condition: `k_idx <= q_idx`; it returned {describe(result)}")
    elif result.dtype is torch.bool:
        fail(", floating point: `torch.where(condition, score, -torch.inf)`; it returned a condition, of bool")
    elif not result.is_floating_point():
        fail(f", floating point: `x.to(score.dtype)`; it returned {describe(result)}")
    elif result.dim() == 0:
        fail(", of each pair: `torch.full_like(score, x)`; it returned one number, without dimensions")
    try:
        fits = torch.broadcast_shapes(result.shape, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        fail(f"; for a {'tile' if role.hides else 'score'} {list(shape)} it returned {list(result.shape)}")
