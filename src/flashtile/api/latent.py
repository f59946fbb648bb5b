"""Queries of their own for the values (`qv`), by rows of values and keys together: the values are the first columns of
the keys, as with `v_dim` (`settings.values_of`).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, call_of


class Joined(NamedTuple):
    """The queries and keys of a call with `qv`, and the number of columns of its keys that are values."""

    q: Tensor
    k: Tensor
    v_dim: int
    copied: bool  # rows of v and k are not in one tensor


def with_query_of_values(function: str, q: Any, k: Any, v: Any, qv: Any) -> Joined:
    """A call with `qv`, whose scores are `<q, k> + <qv, v>`, as one with `v_dim`. Rows of k right behind rows of v are
    taken as they are, others are copied.

    Raises:
        ArgumentError: a tensor is missing, or `qv` is not q with the width of v.
    """
    cached = function == "attention_with_kvcache"
    names = ("k_cache", "v_cache") if cached else ("k", "v")
    for name, x in (("q", q), (names[0], k), (names[1], v), ("qv", qv)):
        if not isinstance(x, Tensor) or x.dim() == 0:
            raise ArgumentError(name, x, "a torch.Tensor, with qv", call_of(function, "qv=qv"))
    if q.element_size() == 1:
        raise ArgumentError("qv", qv, "None with queries of 8 bits, which have one scale", call_of(function, "qv=None"))
    if qv.shape != (*q.shape[:-1], v.shape[-1]) or qv.dtype != q.dtype or qv.device != q.device:
        accepted = f"the shape of q with the width of v, {[*q.shape[:-1], v.shape[-1]]}, of q's dtype and device"
        raise ArgumentError("qv", qv, accepted, call_of(function, "qv=qv"))
    if v.shape[:-1] != k.shape[:-1] or v.dtype != k.dtype or v.device != k.device:
        accepted = f"the shape of {names[0]} up to the last dimension, {list(k.shape[:-1])}, its dtype and device"
        raise ArgumentError(names[1], v, accepted, call_of(function, "qv=qv"))
    joined = rows_of_both(k, v)
    rows = torch.cat((v, k), -1) if joined is None else joined
    return Joined(torch.cat((qv, q), -1), rows, v.shape[-1], joined is None)


def cache_with_query_of_values(
    q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, qv: Any, rotary_cos: Any
) -> tuple[Joined, Tensor | None]:
    """`with_query_of_values` of a cache, and the rows to append.

    Raises:
        ArgumentError: as there; also where rotary positions or new tokens have no place in rows of both.
    """
    function = "attention_with_kvcache"
    if rotary_cos is not None:
        accepted = "None with qv: turn q and the new k before the call"
        raise ArgumentError("rotary_cos", rotary_cos, accepted, call_of(function, "qv=qv"))
    joined = with_query_of_values(function, q, k_cache, v_cache, qv)
    if k is None and v is None:
        return joined, None
    if not isinstance(k, Tensor) or not isinstance(v, Tensor) or k.shape[:-1] != v.shape[:-1]:
        raise ArgumentError("v", v, "both k and v, or neither", call_of(function, "k=k, v=v, qv=qv"))
    if joined.copied:
        accepted = (
            "with qv and new tokens, a cache whose rows have those of k_cache right behind them: both are views of one "
            "tensor, v_cache = rows[..., :Dv] and k_cache = rows[..., Dv:]; under torch.compile, v_dim"
        )
        raise ArgumentError("v_cache", v_cache, accepted, call_of(function, "k=k, v=v, qv=qv"))
    return joined, torch.cat((v, k), -1)


def rows_of_both(k: Tensor, v: Tensor) -> Tensor | None:
    """Rows of v and k as one view, if k begins where v ends; `None` otherwise, and where autograd would lose track."""
    if torch.compiler.is_compiling() or k.requires_grad or v.requires_grad or k.stride() != v.stride():
        return None
    behind = k.storage_offset() - v.storage_offset() == v.shape[-1] and k.stride(-1) == 1
    try:
        together = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a transform's wrapper
        return None
    width = v.shape[-1] + k.shape[-1]
    if (
        not behind
        or not together
        or any(n > 1 and 0 < step < width for n, step in zip(k.shape, k.stride()[:-1], strict=False))
    ):
        return None
    return v.as_strided((*v.shape[:-1], width), v.stride(), v.storage_offset())
