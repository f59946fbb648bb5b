"""From what a user writes to what an operator takes: causal becomes a window, a seed a tensor, a function a ScoreMod.

Everything here is traced by Dynamo, so it looks at Python values and types only; shapes are checked in the operator.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from .call import Call, Settings, Tensors
from .errors import ArgumentError
from .expression import ScoreMod
from .masks import Window

Causal = bool | Literal["top_left"]
WindowArgument = tuple[int | None, int | None] | None
ScoreModArgument = ScoreMod | Callable[..., Tensor] | None
TENSORS = Tensors._fields[:-1]


def normalize(
    tensors: dict[str, Any],
    *,
    causal: Any,
    window: Any,
    scale: Any,
    softcap: Any,
    score_mod: Any,
    dropout_p: Any,
    dropout_seed: Any,
    deterministic: Any,
    backend: Any,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    num_splits: Any = None,
    cached: bool = False,
) -> Call:
    """The call of the public functions' arguments. `tensors` holds those that are tensors as they stand; `cached`
    says that k and v are caches, which are written in place and so keep their dtype, and that q may be dense.
    """
    require_tensors(tensors, ("q", "k", "v") if cached else ("q", "k", "v", "cu_seqlens_q"))
    tensors = in_autocast_dtype(tensors, ("q",) if cached else ("q", "k", "v"))
    q = tensors["q"]
    bounds = window_of(causal, window)
    dropout_p = number("dropout_p", dropout_p, "0 <= dropout_p < 1", lambda p: 0 <= p < 1, "dropout_p=0.1")
    modifier = score_mod_of(score_mod)
    settings = Settings(
        scale=scale_of(scale, q),
        softcap=softcap_of(softcap),
        window_left=bounds.left,
        window_right=bounds.right,
        top_left=bounds.top_left,
        dropout_p=dropout_p,
        score_mod=None if modifier is None else modifier.key,
        max_seqlen_q=length("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=length("max_seqlen_k", max_seqlen_k),
        num_splits=splits_of(num_splits),
        deterministic=flag("deterministic", deterministic, torch.are_deterministic_algorithms_enabled()),
        backend=name("backend", backend),
    )
    return Call(
        Tensors(
            **tensors,
            dropout_seed=seed_of(dropout_seed, q.device) if dropout_p > 0 else None,
            score_mod_tensors=() if modifier is None else modifier.tensors,
        ),
        settings,
    )


def require_tensors(tensors: dict[str, Any], required: tuple[str, ...]) -> None:
    for argument, value in tensors.items():
        optional = argument not in required
        if not (isinstance(value, Tensor) or (optional and value is None)):
            raise ArgumentError(argument, value, "a torch.Tensor" + " or None" * optional)


def in_autocast_dtype(tensors: dict[str, Any], cast: tuple[str, ...]) -> dict[str, Any]:
    """Under torch.autocast, q, k and v take its dtype, as in scaled_dot_product_attention; fp64 stays as it is."""
    q = tensors["q"]
    if not torch.is_autocast_enabled(q.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(q.device.type)
    tensors = dict(tensors)
    for argument in cast:
        x = tensors.get(argument)
        if x is not None and x.dtype in (torch.float16, torch.bfloat16, torch.float32):
            tensors[argument] = x.to(dtype)
    for argument in ("bias", "alibi_slopes", "sinks"):
        x = tensors.get(argument)
        if x is not None and x.dtype in (torch.float16, torch.bfloat16) and x.dtype != dtype:
            tensors[argument] = x.float()
    return tensors


def window_of(causal: Any, window: Any) -> Window:
    left: int | None = None
    right: int | None = None
    if window is not None:
        sides = window if isinstance(window, tuple | list) and len(window) == 2 else None
        if sides is None or any(not (n is None or (is_int(n) and n >= -1)) for n in sides):
            accepted = "None, or (left, right) of integers from 0, where None or -1 is unlimited"
            example = "flashtile.attention(q, k, v, causal=True, window=(127, 0))"
            raise ArgumentError("window", window, accepted, example)
        left, right = (None if n is None or n == -1 else n for n in sides)
    if causal is False:
        return Window(left, right)
    if causal is True:
        return Window(left, 0)  # a right side above 0 would be hidden by causal
    if isinstance(causal, str) and causal == "top_left":
        return Window(left, right, top_left=True)
    accepted = "False, True (bottom-right) or 'top_left'"
    raise ArgumentError("causal", causal, accepted, "flashtile.attention(q, k, v, causal=True)")


def scale_of(scale: Any, q: Tensor) -> float:
    if scale is None:
        head_dim = q.shape[-1] if q.dim() > 0 else 1
        return 1.0 / math.sqrt(head_dim) if head_dim > 0 else 1.0
    return number("scale", scale, "a finite number, or None for head_dim ** -0.5", math.isfinite, "scale=0.125")


def softcap_of(softcap: Any) -> float | None:
    if softcap is None:
        return None
    accepted = "a finite number above 0; None or 0 is no softcap"
    return number("softcap", softcap, accepted, lambda x: math.isfinite(x) and x >= 0, "softcap=50.0") or None


def seed_of(seed: Any, device: torch.device) -> Tensor:
    """An int64 tensor of one element on `device`; drawn from torch's default generator if there is none."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed
    if not is_int(seed) or not -(2**63) <= seed < 2**64:
        accepted = "an int of 64 bits, or an int64 tensor of one element"
        example = "flashtile.attention(q, k, v, dropout_p=0.1, dropout_seed=7)"
        raise ArgumentError("dropout_seed", seed, accepted, example)
    return torch.full((1,), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=device)


def score_mod_of(score_mod: ScoreModArgument) -> ScoreMod | None:
    if score_mod is None or isinstance(score_mod, ScoreMod):
        return score_mod
    if torch.compiler.is_compiling():
        example = "mod = flashtile.ScoreMod(fn, (tensor,)) outside, and score_mod=mod inside the compiled function"
        raise ArgumentError("score_mod", score_mod, "a flashtile.ScoreMod, under torch.compile", example)
    return ScoreMod.of(score_mod)


def number(argument: str, value: Any, accepted: str, accepts: Callable[[Any], bool], example: str) -> float:
    a_number = isinstance(value, int | float | torch.SymFloat | torch.SymInt) and not isinstance(value, bool)
    if not a_number or not accepts(value):
        raise ArgumentError(argument, value, accepted, f"flashtile.attention(q, k, v, {example})")
    return float(value)


def length(argument: str, value: Any) -> int | None:
    if value is not None and (not is_int(value) or value < 0):
        example = f"flashtile.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, {argument}=128)"
        raise ArgumentError(argument, value, "an int from 0, or None for the total number of tokens", example)
    return value


def splits_of(value: Any) -> int | None:
    if value is not None and (not is_int(value) or value < 1):
        example = "flashtile.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, num_splits=4)"
        raise ArgumentError("num_splits", value, "an int from 1, or None to choose", example)
    return value


def flag(argument: str, value: Any, default: bool) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ArgumentError(argument, value, "True, False or None", f"flashtile.attention(q, k, v, {argument}=True)")
    return default if value is None else value


def name(argument: str, value: Any) -> str:
    if not isinstance(value, str):
        example = "flashtile.attention(q, k, v, backend='auto')"
        raise ArgumentError(argument, value, "the name of a backend, or 'auto'", example)
    return value


def is_int(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
