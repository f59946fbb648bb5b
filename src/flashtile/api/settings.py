"""The settings of a call from the numbers, strings and pairs that a user writes, each with what is accepted for it."""

import functools
import math
import operator
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.cache_tensors import RotarySettings
from ..call.call import Settings
from ..call.eight_bit import OUT_DTYPES, QUERIES
from ..call.memory import address
from ..call.numbers import ACCEPTED, LARGEST_INT, Accepted, chunk_within_bounds, unless_zero, within_bounds
from ..call.window import ExactWindow, Window
from ..errors import ArgumentError, call_of

DEFAULT_ROTARY = RotarySettings()
UNALIGNED = 1  # `address` of a tensor that has none
OF_A_WINDOW = Accepted(
    -(2**63),
    LARGEST_INT,
    "None, or (left, right) of integers, where None or -1 is unlimited; in a flashtile.ExactWindow, None alone",
    "(127, 0)",
)


def settings_of(function: str, head_dim: int, causal: Any, window: Any, *others: Any) -> Settings:
    """The settings of a call's scalars. Memoized, but not under a trace, nor for windows whose elements' types make
    them invalid.
    """
    pair = type(window) in (tuple, ExactWindow)
    plain = window is None or (pair and all(n is None or type(n) is int for n in window))
    if plain and not torch.compiler.is_compiling():
        try:
            return known_settings(function, head_dim, causal, window, *others)
        except TypeError:  # something without a hash: it is not accepted, or a symbol of a trace
            pass
    return new_settings(function, head_dim, causal, window, *others)


def new_settings(
    function: str,
    head_dim: int,
    causal: Any,
    window: Any,
    attention_chunk: Any,
    scale: Any,
    softcap: Any,
    dropout_p: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    num_splits: Any,
    deterministic: Any,
    batch_invariant: Any,
    backend: Any,
) -> Settings:
    bounds = window_of(function, causal, window)
    return Settings(
        scale=scale_of(function, scale, head_dim),
        softcap=None if softcap is None else unless_zero(number(function, "softcap", softcap)),
        window_left=bounds.left,
        window_right=bounds.right,
        top_left=bounds.top_left,
        attention_chunk=chunk_of(function, attention_chunk),
        dropout_p=number(function, "dropout_p", dropout_p),
        max_seqlen_q=integer(function, "max_seqlen_q", max_seqlen_q),
        max_seqlen_k=integer(function, "max_seqlen_k", max_seqlen_k),
        num_splits=integer(function, "num_splits", num_splits),
        deterministic=flag(function, "deterministic", deterministic, "True, False or None"),
        batch_invariant=flag(function, "batch_invariant", batch_invariant, "True or False"),
        backend=backend_name(function, backend),
    )


known_settings = functools.lru_cache(maxsize=1024, typed=True)(new_settings)


def window_of(function: str, causal: Any, window: Any) -> Window:
    left: int | None = None
    right: int | None = None
    if window is not None:
        a_pair = isinstance(window, tuple | list) and len(window) == 2
        sides: list[Any] = [n if n is None else as_int(n) for n in window] if a_pair else []
        unlimited = None if isinstance(window, ExactWindow) else -1
        if not a_pair or any(
            (n is None and given is not None) or (n is not None and OF_A_WINDOW.excludes(n))
            for n, given in zip(sides, window, strict=True)
        ):
            raise ArgumentError("window", window, OF_A_WINDOW.words, call_of(function, f"window={OF_A_WINDOW.example}"))
        left, right = (None if n is None or n == unlimited else within_bounds(n) for n in sides)
    if causal is False:
        return Window(left, right)
    if causal is True:
        return Window(left, 0 if right is None else min(right, 0))  # causal hides what is to the right of 0
    if isinstance(causal, str) and causal == "top_left":
        return Window(left, right, top_left=True)
    accepted = "False, True (bottom-right) or 'top_left'"
    raise ArgumentError("causal", causal, accepted, call_of(function, "causal=True"))


def chunk_of(function: str, chunk: Any) -> int | None:
    return chunk_within_bounds(integer(function, "attention_chunk", chunk))


def scale_of(function: str, scale: Any, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim > 0 else 1.0
    return number(function, "scale", scale)


def rotary_of(interleaved: Any, q_fixed: Any) -> RotarySettings:
    if interleaved is True and q_fixed is False:
        return DEFAULT_ROTARY
    function, accepted = "attention_with_kvcache", "True or False"
    return RotarySettings(
        flag(function, "rotary_interleaved", interleaved, accepted), flag(function, "rotary_q_fixed", q_fixed, accepted)
    )


def number(function: str, argument: str, value: Any) -> float:
    """The float that a value is, or its symbol."""
    accepted = ACCEPTED[argument]
    x: Any = value
    if isinstance(value, Real) and not isinstance(value, int | float):  # NumPy's, whose arithmetic may overflow
        x = float(value)
    a_number = isinstance(x, int | float | torch.SymFloat | torch.SymInt) and not isinstance(x, bool)
    if not a_number or accepted.excludes(x):
        raise ArgumentError(argument, value, accepted.words, call_of(function, f"{argument}={accepted.example}"))
    return torch.sym_float(x)  # type: ignore[no-any-return]  # in a trace, a symbol


def integer(function: str, argument: str, value: Any) -> int | None:
    if value is None:
        return None
    accepted, n = ACCEPTED[argument], as_int(value)
    if n is None or accepted.excludes(n):
        raise ArgumentError(argument, value, accepted.words, call_of(function, f"{argument}={accepted.example}"))
    return n


def flag(function: str, argument: str, value: Any, accepted: str) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(argument, value, accepted, call_of(function, f"{argument}=True"))
    return value


def requested_dtype(function: str, q: Tensor, value: Any) -> str | None:
    """The name of the result's dtype, of queries of 8 bits; `None` for bfloat16, which is theirs."""
    names = [str(dtype).removeprefix("torch.") for dtype in OUT_DTYPES]
    accepted = f"torch.{', torch.'.join(names)} or None"
    if q.dtype is not QUERIES:
        accepted = f"None for queries of {q.dtype}, whose result has their dtype; out.to(dtype) of it"
    if q.dtype is not QUERIES or value not in OUT_DTYPES:
        raise ArgumentError("out_dtype", value, accepted, call_of(function, "out_dtype=torch.float16"))
    return None if value is OUT_DTYPES[0] else names[OUT_DTYPES.index(value)]


def backend_name(function: str, value: Any) -> str:
    if not isinstance(value, str):
        accepted = "the name of a backend, or 'auto'"
        raise ArgumentError("backend", value, accepted, call_of(function, "backend='auto'"))
    return value


def as_int(value: Any) -> Any:
    """The int that a value is, NumPy's included, or its symbol; `None` for all else. A tensor would have to be read
    back.
    """
    if isinstance(value, int | torch.SymInt):
        return None if isinstance(value, bool) else value
    try:
        return None if isinstance(value, Tensor) else operator.index(value)
    except TypeError:
        return None


class Values(NamedTuple):
    """The values of a call and their scales; where they are the first columns of k, their number."""

    v: Any
    v_descale: Any
    v_dim: int | None


def values_of(
    function: str, k: Any, v: Any, k_descale: Any, v_descale: Any, v_dim: Any, *, appends: bool = False
) -> Values:
    """The values of a call; `appends` where it has new ones, too, which a view of k cannot hold.

    Raises:
        ArgumentError: `v_dim` is no number of columns, or there are values or scales of values beside it.
    """
    if not isinstance(k, Tensor) or k.dim() == 0:
        return Values(v, v_descale, None)  # the error is k's
    if v_dim is None:
        is_view = not appends and k_descale is v_descale and is_view_of_keys(k, v)
        return Values(v, v_descale, v.shape[-1] if is_view else None)
    name = "v_cache" if function == "attention_with_kvcache" else "v"
    if v is not None:
        raise ArgumentError(name, v, "None with v_dim: the values are the first columns of k", latent_example(function))
    if v_descale is not None and v_descale is not k_descale:
        accepted = "None with v_dim: the values have the scales of k"
        raise ArgumentError("v_descale", v_descale, accepted, latent_example(function))
    columns = as_int(v_dim)
    if columns is None or not 1 <= columns <= k.shape[-1]:
        accepted = f"an int from 1 to {k.shape[-1]}, the columns of k that are its values; or None"
        raise ArgumentError("v_dim", v_dim, accepted, latent_example(function))
    return Values(k[..., :columns], k_descale, columns)


def latent_example(function: str) -> str:
    if function == "attention":
        return "flashtile.attention(q, k, None, v_dim=512, scale=192**-0.5)"
    if function == "attention_varlen":
        return "flashtile.attention_varlen(q, k, None, cu_seqlens_q, cu_seqlens_k, v_dim=512, scale=192**-0.5)"
    return call_of(function, "v_dim=512, scale=192**-0.5").replace("v_cache", "None")


def may_be_view(k: Tensor, v: Tensor) -> bool:
    """Whether v is the first columns of k if it begins where k does: its rows are narrower, and as far apart."""
    narrower = v.dim() == k.dim() and v.shape[:-1] == k.shape[:-1] and 0 < v.shape[-1] < k.shape[-1]
    return narrower and v.dtype == k.dtype and v.stride() == k.stride()


def is_view_of_keys(k: Tensor, v: Any) -> bool:
    """Whether v is the first columns of k, by its address. A compiler's tensors have none."""
    if torch.compiler.is_compiling() or not isinstance(v, Tensor) or not may_be_view(k, v):
        return False
    return UNALIGNED != address(k) == address(v)
