"""From what a user writes to what an operator takes: causal becomes a window, a seed a tensor, a function a ScoreMod or
MaskMod.

Everything here is traced by Dynamo, so it looks at Python values and types only; shapes are checked in the operator.
"""

from typing import Any

import torch
from torch import Tensor

from .. import private_torch
from ..block_mask import BlockMask, is_flex
from ..call.cache_tensors import CACHE_REQUIRED, CacheTensors
from ..call.call import FEATURES, Call, Settings, Tensors
from ..call.eager import PLAIN, has_own_functions, is_plain_eager
from ..call.features import SCORES
from ..errors import ArgumentError, call_of
from ..expression import MaskMod, ScoreMod
from ..expression.formula import PREFIX
from ..expression.modifier import Modifier
from .band import with_band
from .settings import as_int, requested_dtype, settings_of

REQUIRED = ("q", "k", "v", "cu_seqlens_q")
OF_SCORES = tuple(name for name, feature in FEATURES.items() if feature.dtype == SCORES)


def normalize(
    function: str,
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
    attention_chunk: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    num_splits: Any = None,
    v_dim: int | None = None,
    batch_invariant: Any = False,
    out_dtype: Any = None,
    cache: CacheTensors | None = None,
    whole: bool = True,
) -> Call:
    """The call of a public function's arguments. `tensors` holds those that are tensors as they stand; of a KV cache,
    k and v are the caches, and what else it has is in `cache`. With `v_dim`, v is as many of k's first columns. Without
    `whole`, they have a part of the positions.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    scalars = (
        causal, window, attention_chunk, scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, num_splits,
        deterministic, batch_invariant, backend,
    )  # fmt: skip
    mask_mod = tensors.get("mask")
    if mask_mod is not None and (isinstance(mask_mod, MaskMod) or callable(mask_mod) or is_flex(mask_mod)):
        tensors = tensors | {"mask": None}
    else:
        mask_mod = None
    if cache is not None:  # first, for k and v have other names in it
        require_tensors(function, cache._asdict(), CACHE_REQUIRED)
        same_place(function, cache.k_cache, cache._asdict())
    require_tensors(function, tensors, REQUIRED if cache is None else REQUIRED[:3])
    reject_symbolic(function, tensors)
    q = tensors["q"]
    same_place(function, q, tensors)
    # Caches are written in place, so they keep their dtype.
    tensors = in_autocast_dtype(tensors, REQUIRED[:3] if cache is None else REQUIRED[:1])
    tensors = in_score_dtype(tensors)
    settings = settings_of(function, q.shape[-1] if q.dim() > 0 else 1, *scalars)
    if v_dim is not None:
        settings = settings._replace(v_dim=v_dim)
    if out_dtype is not None:
        settings = settings._replace(out_dtype=requested_dtype(function, q, out_dtype))
    if not private_torch.known(settings.dropout_p == 0):
        seed = seed_of(function, dropout_seed, q.device)
        same_place(function, q, {"dropout_seed": seed})
        tensors = tensors | {"dropout_seed": seed}
    if score_mod is not None or mask_mod is not None:
        tensors, settings = with_functions(function, tensors, settings, score_mod, mask_mod)
        settings = with_band(function, tensors, settings) if whole else settings
    is_plain = is_unobserved(tensors, settings, cache)
    if not is_plain:
        tensors = tensors | {"out": None}  # an operator has no argument for it
    return Call(Tensors(**tensors), settings, is_plain_eager=is_plain)


def is_unobserved(tensors: dict[str, Any], settings: Settings, cache: CacheTensors | None) -> bool:
    """Whether nothing but its kernels would look at a call, whose functions of pairs are formulas."""
    if torch.compiler.is_compiling() or (cache is not None and private_torch.is_any_autocast_enabled()):
        return False
    functions = (settings.score_mod, settings.mask_mod)
    return all(key is None or key.startswith(PREFIX) for key in functions) and is_plain_eager(
        *[x for x in tensors.values() if not isinstance(x, tuple)],
        *tensors.get("score_mod_tensors", ()),
        *(() if cache is None else cache[2:]),
    )


def require_tensors(function: str, tensors: dict[str, Any], required: tuple[str, ...]) -> None:
    for argument, value in tensors.items():
        if isinstance(value, Tensor) or (value is None and argument not in required):
            continue
        or_function = ", a function, a flashtile.MaskMod" * (argument == "mask")
        accepted = f"a torch.Tensor{or_function}" + " or None" * (argument not in required)
        raise ArgumentError(argument, value, accepted, call_of(function))


def reject_symbolic(function: str, tensors: dict[str, Any]) -> None:
    """Refuse a mask or bias that may stand for its elements instead of holding them, as PyTorch's `CausalBias` does.
    Other tensors of such classes are data, with whatever the class adds to them.
    """
    for argument in ("mask", "bias"):
        x = tensors.get(argument)
        if x is not None and type(x) not in PLAIN and has_own_functions(type(x)):
            accepted = (
                "causal=True (to the lower right) or causal='top_left' in the place of a CausalBias; else the elements "
                f"themselves, as {argument}.as_subclass(torch.Tensor)"
            )
            raise ArgumentError(argument, x, accepted, call_of(function, "causal=True"))


def same_place(function: str, q: Tensor, tensors: dict[str, Any]) -> None:
    """Strided tensors on one device: others would not even reach the operator, or run as something else."""
    device = q.device
    for argument, x in tensors.items():
        if x is None:
            continue
        if x.is_nested or x.layout is not torch.strided:
            accepted = "a strided tensor; for sequences of different lengths, flashtile.attention_varlen"
            raise ArgumentError(argument, x, accepted, call_of(function))
        if x.device != device:
            accepted = f"a tensor on the device of q, {device}, as {argument}.to(q.device) is"
            raise ArgumentError(argument, x, accepted, call_of(function))


def in_autocast_dtype(tensors: dict[str, Any], cast: tuple[str, ...]) -> dict[str, Any]:
    """Under torch.autocast, q, k and v take its dtype, as in scaled_dot_product_attention; fp64 stays as it is."""
    device_type = tensors["q"].device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta has no autocast to ask about
        return tensors
    dtype, changed = torch.get_autocast_dtype(device_type), {}
    for argument in cast:
        x = tensors[argument]
        if x is not None and x.dtype != dtype and x.dtype in (torch.float16, torch.bfloat16, torch.float32):
            changed[argument] = x.to(dtype)
    for argument in OF_SCORES:
        x = tensors.get(argument)
        if x is not None and x.dtype in (torch.float16, torch.bfloat16) and x.dtype != dtype:
            changed[argument] = x.float()
    return tensors | changed if changed else tensors


def in_score_dtype(tensors: dict[str, Any]) -> dict[str, Any]:
    """Bias, slopes and sinks of any floating-point dtype in one that kernels read: q's, or float32. Their gradients
    come back in their own.
    """
    cast = {}
    for argument in OF_SCORES:
        x = tensors.get(argument)
        if x is not None and x.is_floating_point() and x.dtype not in FEATURES[argument].dtypes(tensors["q"].dtype):
            cast[argument] = x.float()
    return tensors | cast if cast else tensors


def seed_of(function: str, seed: Any, device: torch.device) -> Tensor:
    """An int64 tensor of one element on `device`; drawn from torch's default generator if there is none."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed
    n = as_int(seed)
    if n is None or not -(2**63) <= n < 2**64:
        accepted = "an int of 64 bits, or an int64 tensor of one element"
        raise ArgumentError("dropout_seed", seed, accepted, call_of(function, "dropout_p=0.1, dropout_seed=7"))
    return torch.full((1,), n - 2**64 if n >= 2**63 else n, dtype=torch.int64, device=device)


def constants(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors of a mask function, which have no gradient."""
    for x in tensors:
        if x.is_floating_point():
            return tuple([x.detach() if x.is_floating_point() else x for x in tensors])
    return tensors


def with_functions(
    function: str, tensors: dict[str, Any], settings: Settings, score_mod: Any, mask_mod: Any
) -> tuple[dict[str, Any], Settings]:
    """The tensors and settings of a call with a score_mod, a mask function, or both."""
    q, captured = tensors["q"], []
    if score_mod is not None:
        modifier = modifier_of(ScoreMod, score_mod, q)
        same_place(function, q, {f"score_mod.tensors[{n}]": x for n, x in enumerate(modifier.tensors)})
        captured, settings = [*modifier.tensors], settings._replace(score_mod=modifier.current_key)
    if mask_mod is not None:
        modifier = modifier_of(MaskMod, mask_mod, q)
        if isinstance(modifier, BlockMask):
            reject_block_lists(function, modifier, tensors)
        same_place(function, q, {f"mask.tensors[{n}]": x for n, x in enumerate(modifier.tensors)})
        captured += constants(modifier.tensors)
        settings = settings._replace(mask_mod=modifier.current_key, num_mask_tensors=len(modifier.tensors))
    return tensors | {"score_mod_tensors": tuple(captured)}, settings


def reject_block_lists(function: str, mask: BlockMask, tensors: dict[str, Any]) -> None:
    """Refuse lists of blocks for other lengths than the call's."""
    example = call_of(function, "mask=mask_function")
    if function == "attention":
        q, k = tensors["q"], tensors["k"]
        if q.dim() == k.dim() == 4:  # or else the call is refused for that
            mask.reject_lengths(example, q.shape[2], k.shape[2])
    else:
        mask.reject_packed(example)


def modifier_of(kind: type[Modifier], value: Any, q: Tensor) -> Modifier:
    """The ScoreMod or MaskMod of an argument."""
    if is_flex(value) and not torch.compiler.is_compiling():
        value = BlockMask.of_flex(value)
    if isinstance(value, kind) and not value.each_call:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # what it reads may have changed since
            value.reject_undeclared_gradients(q.device)
        return value if torch.compiler.is_compiling() else value.in_call(q)
    if torch.compiler.is_compiling():
        role = kind.role
        example = (
            f"mod = flashtile.{role.owner}(fn, (tensor,)) outside, and {role.argument}=mod inside the compiled function"
        )
        accepted = f"a flashtile.{role.owner} of a function that calculates with single numbers, under torch.compile"
        raise ArgumentError(role.argument, value, accepted, example)
    return kind.of(value, q)


def lengths_of(argument: str, n: Any, q: Any, cu_seqlens_q: Any) -> Tensor:
    """A length or position that all sequences of a KV-cache call share, as the tensor `[B]` of it."""
    number, function = as_int(n), "attention_with_kvcache"
    if number is None or private_torch.known(number < 0) or private_torch.known(number >= 2**31):
        accepted = "int32 (or int64) [B], or an int from 0 that all sequences share"
        raise ArgumentError(argument, n, accepted, call_of(function))
    require_tensors(function, {"q": q, "cu_seqlens_q": cu_seqlens_q}, ("q",))
    batch = (q.shape[0] if q.dim() else 1) if cu_seqlens_q is None else max(cu_seqlens_q.numel() - 1, 0)
    return torch.full((batch,), number, dtype=torch.int32, device=q.device)
