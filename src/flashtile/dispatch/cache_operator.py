"""The operator of `attention_with_kvcache`: one call that appends in place and attends, opaque to `torch.compile`.

It reads nothing back from a GPU and its shapes follow from the arguments', so it can be captured in a CUDA graph.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake, register_vmap

from .. import private_torch
from ..call.cache import CacheCall, append_and_rotate, written_descales
from ..call.cache_tensors import CacheTensors, RotarySettings
from ..call.call import FEATURES as FEATURES_OF_CALLS
from ..call.call import SETTINGS, Call, Settings, Tensors, lse_shape, new_rows, public_lse
from ..call.check_cache import check_writable
from ..call.eager import in_forward_mode
from ..call.eight_bit import is_eight_bit
from ..call.features import CACHE, INDEX, TENSOR_LIST
from ..call.latent_rows import is_packed, unpacked
from ..call.problem import accumulation_dtype
from ..call.written import mark_written
from ..dynamo import untraced
from ..errors import AttentionError
from . import fast_path
from .operators import LIBRARY, check_numbers, run_forward
from .passes import inside_operator
from .planner import is_declined

NAME = "attention_with_kvcache"
OPTIONAL_CACHE = CacheTensors._fields[3:]
WRITTEN = {"k_descale": "(c!)", "v_descale": "(d!)"}  # where scales are those of tokens
FEATURES = ["cu_seqlens_q", *(name for name, x in FEATURES_OF_CALLS.items() if CACHE in x.layouts and x.dtype != INDEX)]
OF_CACHE = [field for field in SETTINGS if field.in_layout(CACHE)]
SCHEMA = ", ".join(
    (
        "Tensor q, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor cache_seqlens",
        *(f"Tensor{WRITTEN.get(name, '')}? {name}" for name in (*OPTIONAL_CACHE, *FEATURES)),
        f"{TENSOR_LIST} score_mod_tensors",
        *(f"bool rotary_{name}" for name in RotarySettings._fields),
        *(field.schema(CACHE) for field in OF_CACHE),
    )
)


def arguments(
    q: Tensor, cache: CacheTensors, features: Tensors, settings: Settings, rotary: RotarySettings
) -> list[Any]:
    """A call as the operator takes it. Values that are columns of k are no argument: it writes into each only once."""
    if settings.v_dim is not None:
        cache = cache._replace(v_cache=None, v_descale=None)
    optional = (getattr(features, name) for name in FEATURES)
    scalars = (getattr(settings, field.name) for field in OF_CACHE)
    return [q, *cache, *optional, list(features.score_mod_tensors) or None, *rotary, *scalars]


def attend_with_cache(call: CacheCall) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a normalized call."""
    cache, q = call.cache, call.tensors.q
    refuse_derivatives(call.inputs)
    if fast_path.bypasses_dispatcher(call):
        return run_with_cache(call)
    if cache.k is not None and torch.is_autocast_enabled(q.device.type):
        dtype = q.dtype if not is_eight_bit(q) else torch.get_autocast_dtype(q.device.type)
        k, v = (None if x is None else x.to(dtype) for x in (cache.k, cache.v))
        cache = cache._replace(k=k, v=v)
    operator = torch.ops.flashtile.attention_with_kvcache.default
    return operator(*arguments(q, cache, call.tensors, call.settings, call.rotary))


def refuse_derivatives(*tensors: Iterable[Any]) -> None:
    wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in chain(*tensors))
    if wanted or in_forward_mode():
        raise AttentionError(
            "attention_with_kvcache has no derivatives: it writes into its caches, and an argument requires a gradient "
            "or forward mode is active.\n"
            "  accepted: a call inside `with torch.no_grad():`; for training, flashtile.attention(q, k, v)"
        )


def without_derivatives(*operands: Any) -> tuple[Tensor, Tensor]:
    """The operator as autograd meets it in a traced program, whose Python is gone: without this, the derivative would
    be zero.
    """
    refuse_derivatives(operands, *(x for x in operands if isinstance(x, list | tuple)))
    with private_torch.AutoDispatchBelowAutograd():
        return torch.ops.flashtile.attention_with_kvcache.default(*operands)


def call_of(q: Tensor, *operands: Any) -> CacheCall:
    """The inverse of `arguments`."""
    values = list(operands)
    cache = CacheTensors(*values[: len(CacheTensors._fields)])
    rest = values[len(CacheTensors._fields) :]
    named = dict(zip(FEATURES, rest, strict=False))
    modifiers, interleaved, q_fixed, *scalars = rest[len(FEATURES) :]
    settings = Settings(**dict(zip([field.name for field in OF_CACHE], scalars, strict=True)))
    if settings.v_dim is not None:
        cache = cache._replace(v_cache=cache.k_cache[..., : settings.v_dim], v_descale=cache.k_descale)
    features = Tensors(q, cache.k_cache, cache.v_cache, score_mod_tensors=modifiers or (), **named)
    return CacheCall(Call(features, settings), cache, RotarySettings(interleaved, q_fixed))


def run(*operands: Any) -> tuple[Tensor, Tensor]:
    call = call_of(*operands)
    check_numbers(NAME, call)
    return run_with_cache(call)


@untraced
def run_with_cache(call: CacheCall) -> tuple[Tensor, Tensor]:
    """The operator's own work."""
    call.entry = call.entry or fast_path.find_call(call)
    cache = call.cache
    attend = attend_to_copy if is_packed(cache.k_cache) and reads_copy(call) else attend_to_cache
    if cache.k is None:
        return attend(call)
    if call.entry is not None and call.entry.paged is not None:  # else the checks of a new layout do
        check_writable(call.entry, cache.k_cache, cache.v_cache, cache.k, cache.v)
    results = attend(call)
    mark_written(cache.k_cache, cache.v_cache, *written_descales(cache))
    return results


def attend_to_cache(call: CacheCall) -> tuple[Tensor, Tensor]:
    return public_lse(call, run_forward(call))


def reads_copy(call: CacheCall) -> bool:
    """Whether no backend reads the rows of 656 bytes of a call as they are."""
    entry = call.entry
    if entry is None:
        return is_declined(call.with_own_indices())
    if entry.reads_copy is None:
        entry.reads_copy = is_declined(call.with_own_indices())
    return entry.reads_copy  # type: ignore[no-any-return]


def attend_to_copy(call: CacheCall) -> tuple[Tensor, Tensor]:
    """Append packed keys, and attend to a copy in q's dtype of the rows that are needed."""
    call = call.with_own_indices()
    with inside_operator(call):
        attention = unpacked(append_and_rotate(call))
    return public_lse(attention, run_forward(attention))


def fake(*operands: Any) -> tuple[Tensor, Tensor]:
    call = call_of(*operands)
    q = call.tensors.q
    out = new_rows(q, q.shape[1], call.cache.v_cache.shape[-1], call.out_dtype)
    return out, q.new_empty(lse_shape(q), dtype=accumulation_dtype(q.dtype))


def refuse_vmap(*_: Any) -> Any:
    raise AttentionError(
        "attention_with_kvcache writes into its caches, which torch.vmap does not allow.\n"
        "  accepted: the batch as the first dimension of q, with cache_seqlens [B]"
    )


LIBRARY.define(f"{NAME}({SCHEMA}) -> (Tensor out, Tensor lse)")
LIBRARY.impl(NAME, run, "CompositeExplicitAutograd")
if private_torch.AutoDispatchBelowAutograd is not None:
    LIBRARY.impl(NAME, without_derivatives, "Autograd")
register_fake(f"flashtile::{NAME}", fake, lib=LIBRARY)
register_vmap(f"flashtile::{NAME}", refuse_vmap, lib=LIBRARY)
