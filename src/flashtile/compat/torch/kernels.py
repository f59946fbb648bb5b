"""Kernels for PyTorch's operators of flash attention. Shapes, dtypes, strides and values of results are the originals',
also the log-sum-exp of rows that see no key: PyTorch's backward pass is right after this forward pass, and the reverse.

Forward calls the public functions. Backward has the saved output and log-sum-exp, and calls the operator in which
flashtile's own backward pass runs. Dropout stays with PyTorch (`registration.py`): its backward pass repeats no other
mask than its own.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from ...api.attention import Causal, attention
from ...api.varlen import attention_varlen
from ..arguments import infinite_lse, refuse
from .sdpa import mask_keyword

SDPA = "torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)"
VARLEN = "torch.nn.attention.varlen.varlen_attn(query, key, value, cu_seq, cu_seq, max_len, max_len)"
Three = tuple[Tensor, Tensor, Tensor]


# scaled_dot_product_attention ----------------------------------------------------------------------------------------


def sdpa_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Of other lengths, `is_causal` is aligned to the last query and key, as `CausalBias` of PyTorch relies on."""
    if return_debug_mask:
        refuse("return_debug_mask", True, "False", SDPA)
    out, lse = sdpa_forward(query, key, value, None, is_causal, scale)
    return out, infinite_lse(lse), None, None, query.shape[2], key.shape[2], *unused(query)


def sdpa_cuda_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Three:
    settings = {"window_right": 0 if is_causal else None, "scale": scale_of(scale, query)}
    return differentiate("attention_backward", grad_out, query, key, value, out, logsumexp, **settings)


@torch.no_grad()
def sdpa_quantized(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """The kernel of `torch.nn.attention.experimental`'s function for float8_e4m3fn. Scales are float32
    `[B, Hkv]`, `out` is bfloat16, and `is_causal` is aligned as in `sdpa_cuda`.
    """
    if return_debug_mask:
        refuse("return_debug_mask", True, "False", SDPA)
    descales: dict[str, Any] = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    out, lse = attention(query, key, value, causal=is_causal, scale=scale, return_lse=True, **descales)
    return out, infinite_lse(lse), None, None, query.shape[2], key.shape[2], *unused(query)


def sdpa_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    out, lse = sdpa_forward(query, key, value, attn_mask, "top_left" if is_causal else False, scale)
    if attn_mask is not None:  # it may hide all keys of a row, whose lse is 0 in PyTorch's kernel
        lse = lse.masked_fill(lse == -torch.inf, 0)
    return out, lse.mT.contiguous().mT  # the strides of PyTorch's kernel


def sdpa_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Three:
    settings = {"top_left": is_causal, "scale": scale_of(scale, query)} | pairs_of(attn_mask, query)
    dq, dk, dv = differentiate("attention_backward", grad_out, query, key, value, out, logsumexp, **settings)
    return rows_first(dq), rows_first(dk), rows_first(dv)


@torch.no_grad()
def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    causal: Causal,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    mask = pairs_of(attn_mask, query)
    return attention(query, key, value, causal=causal, scale=scale, **mask, return_lse=True)


# varlen_attn ---------------------------------------------------------------------------------------------------------


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> tuple[Any, ...]:
    if return_debug_mask:
        refuse("return_debug_mask", True, "False", VARLEN)
    settings: dict[str, Any] = {
        "causal": is_causal,
        "window": (side(window_size_left), side(window_size_right)),
        "scale": scale,
        "alibi_slopes": alibi_slopes,
        "num_splits": num_splits,
        "return_lse": True,
    }
    with torch.no_grad():
        if cum_seq_q is None:  # [B, S, H, D]
            q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            result, lse = attention(q, k, v, **settings, out=None if out is None else out.transpose(1, 2))
            result = result.transpose(1, 2)
        else:
            settings |= {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
            settings |= {"seqused_k": seqused_k, "page_table": block_table}
            result, lse = attention_varlen(query, key, value, cum_seq_q, cum_seq_k, **settings, out=out)
    return result, infinite_lse(lse), *unused(query)


def flash_forward_into(out: Tensor, query: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
    _, lse, *_ = flash_forward(query, *arguments, **keywords, out=out)
    return lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Three:
    settings: dict[str, Any] = {
        "scale": scale_of(scale, query),
        "window_left": side(window_size_left),
        "window_right": 0 if is_causal else side(window_size_right),
    }
    if cum_seq_q is None:
        dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        dq, dk, dv = differentiate("attention_backward", dout, q, k, v, o, logsumexp, **settings)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
    settings |= {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    return differentiate("attention_varlen_backward", grad_out, query, key, value, out, logsumexp, **settings)


# Shared by both -------------------------------------------------------------------------------------------------------


@functools.cache
def absent(operator: str) -> dict[str, Any]:
    """Arguments of one of flashtile's operators that stand for a call without options, by name."""
    values = {"Tensor": None, "number": 0.0, "bool": False, "SymInt": 0, "int": 0, "str": "auto"}
    schema = getattr(torch.ops.flashtile, operator).default._schema
    found = {}
    for argument in schema.arguments:
        kind = str(argument.type)
        found[argument.name] = None if kind.startswith("Optional") else [] if kind.startswith("List") else values[kind]
    return found | {"needs": [True] * 3 + [False] * (len(schema.returns) - 4)}  # the last is a list


@torch.no_grad()
def differentiate(
    operator: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **settings: Any
) -> Three:
    """Gradients of q, k and v. The lse of a row that sees no key may be PyTorch's, 0 or +inf, as by both the weights of
    its hidden keys are `exp(-inf - lse) = 0`.
    """
    tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse.contiguous()}
    settings["deterministic"] = torch.are_deterministic_algorithms_enabled()
    arguments = absent(operator) | tensors | settings
    dq, dk, dv, *_ = getattr(torch.ops.flashtile, operator).default(**arguments)
    return dq, dk, dv


def pairs_of(attn_mask: Tensor | None, query: Tensor) -> dict[str, Any]:
    return {} if attn_mask is None else mask_keyword(attn_mask, query.shape[:1])


def scale_of(scale: float | None, query: Tensor) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def side(width: int | None) -> int | None:
    return None if width is None or width < 0 else width


def unused(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The seed and offset of dropout, and a mask for debugging."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return state, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def rows_first(x: Tensor) -> Tensor:
    """`[B, H, S, D]` with the strides of `[B, S, H, D]`, as PyTorch's gradients have on a CPU."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


FLASH = {
    "_scaled_dot_product_flash_attention.quantized": sdpa_quantized,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,
    "_flash_attention_backward": flash_backward,
}
OPERATORS = {
    "CPU": FLASH
    | {
        "_scaled_dot_product_flash_attention_for_cpu": sdpa_cpu,
        "_scaled_dot_product_flash_attention_for_cpu_backward": sdpa_cpu_backward,
    },
    "CUDA": FLASH
    | {
        "_scaled_dot_product_flash_attention": sdpa_cuda,
        "_scaled_dot_product_flash_attention_backward": sdpa_cuda_backward,
    },
}
