"""Types of the public functions' arguments, for type checkers, and signatures that follow from another function's.

The overloads of `api` take keywords as these dictionaries, so that `return_lse` alone decides the type of a result and
no signature is written more than once.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal, Required, TypedDict, TypeVar

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


class Keywords(TypedDict, total=False):
    """Keywords of every attention function but `return_lse`."""

    causal: Causal
    window: WindowArgument
    attention_chunk: int | None
    mask: MaskArgument
    scale: float | None
    softcap: float | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    score_mod: ScoreModArgument
    dropout_p: float
    dropout_seed: int | Tensor | None
    num_splits: int | None
    v_dim: int | None
    deterministic: bool | None
    batch_invariant: bool
    out: Tensor | None
    backend: str


class ShardedKeywords(TypedDict, total=False):
    """Keywords of both functions of `flashtile.distributed` for whole sequences."""

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
    dropout_seed: int | None
    deterministic: bool | None
    backend: str


class VarlenKeywords(Keywords, total=False):
    """Keywords of `attention_varlen`."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    page_table: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
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
    k_descale: Tensor | None
    v_descale: Tensor | None
    qv: Tensor | None


def options_of(original: Callable[..., Any], *, without: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Show a function that hands `*options` and `**keywords` to `original` with its optional parameters in their place.

    Args:
        original: its parameters with a default follow the function's own.
        without: names of those that the function does not have.
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
        function.__signature__ = signature.replace(parameters=[*own.values(), *options])  # type: ignore[attr-defined]
        return function

    return with_signature
