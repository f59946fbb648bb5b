"""Types of the public functions' arguments, for type checkers, and signatures that follow from another function's.

The overloads of `api` take keywords as these dictionaries, so that `return_lse` alone decides the type of a result and
no signature is written more than once.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, Required, TypedDict, TypeVar

import torch
from torch import Tensor

from ..block_mask import FlexBlockMask
from ..call.window import ExactWindow
from ..expression import MaskMod, ScoreMod

Function = TypeVar("Function", bound=Callable[..., Any])
Causal = bool | Literal["top_left"]
WindowArgument = tuple[int | None, int | None] | ExactWindow | None
Lengths = Tensor | int
MaskArgument = Tensor | MaskMod | FlexBlockMask | Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None
ScoreModArgument = ScoreMod | Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None


class SharedKeywords(TypedDict, total=False):
    """Keywords of every attention function, sharded ones too, but `return_lse`."""

    causal: Causal
    window: WindowArgument
    attention_chunk: int | None
    mask: MaskArgument
    scale: float | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    score_mod: ScoreModArgument
    dropout_p: float
    deterministic: bool | None
    backend: str


class Keywords(SharedKeywords, total=False):
    """Keywords of every function of one device."""

    bias: Tensor | None
    dropout_seed: int | Tensor | None
    num_splits: int | None
    v_dim: int | None
    batch_invariant: bool
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    out_dtype: torch.dtype | None
    out: Tensor | None


class ShardedKeywords(SharedKeywords, total=False):
    """Keywords of both functions of `flashtile.distributed` for whole sequences."""

    dropout_seed: int | None


class VarlenKeywords(Keywords, total=False):
    """Keywords of `attention_varlen`."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    page_table: Tensor | None
    qv: Tensor | None


class CacheKeywords(Keywords, total=False):
    """Keywords of `attention_with_kvcache`."""

    cache_seqlens: Required[Lengths]
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    leftpad_k: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k_new: Tensor | None
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    rotary_start: Lengths | None
    rotary_q_fixed: bool
    qv: Tensor | None


def options_of(original: Callable[..., Any], *, without: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Show a function that hands `*options` and `**keywords` to `original` with its optional parameters in their place.

    Args:
        original: its parameters with a default follow the function's own.
        without: names of those that the function does not have. It refuses them as other functions refuse unknown
            arguments, by a TypeError.
    """

    def with_signature(function: Function) -> Function:
        catchalls = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        signature = inspect.signature(function)
        own = {name: x for name, x in signature.parameters.items() if x.kind not in catchalls}
        options = [
            x
            for name, x in inspect.signature(original).parameters.items()
            if x.default is not inspect.Parameter.empty and name not in own and name not in without
        ]
        shown = signature.replace(parameters=[*own.values(), *options])
        most = sum(x.kind is not inspect.Parameter.KEYWORD_ONLY for x in shown.parameters.values())

        @functools.wraps(function)
        def refusing(*arguments: Any, **keywords: Any) -> Any:
            if len(arguments) > most or any(name in keywords for name in without):
                shown.bind(*arguments, **keywords)  # raises
            return function(*arguments, **keywords)

        with_options: Any = refusing if without else function
        with_options.__signature__ = shown
        return with_options  # type: ignore[no-any-return]

    return with_signature
