"""Answers for callers who know another library's attention: its names of arguments, its layouts, its masks.

Each ends in the call that works here. The names come from PyTorch's `scaled_dot_product_attention` and
`flex_attention`, and of `flash_attn`.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ..errors import SignatureError, call_of
from .call import Call

Function = TypeVar("Function", bound=Callable[..., Any])

PUBLIC: dict[str, inspect.Signature] = {}  # signatures of the attention functions

# Other libraries' names: the answer, and the keyword that does the same here.
FOREIGN = {
    "is_causal": (
        "`causal`: 'top_left' is is_causal of scaled_dot_product_attention, and True is the same if q is as long as k",
        "causal=True",
    ),
    "enable_gqa": ("nothing: k and v may always have fewer heads than q", ""),
    "block_mask": ("`mask`", "mask=block_mask"),
    "mask_mod": ("`mask`, which takes a function", "mask=mask_mod"),
    "softmax_scale": ("`scale`", "scale=0.125"),
    "window_size": ("`window`", "window=(127, 0)"),
    "block_table": ("`page_table`", "page_table=table"),
    "cache_leftpad": ("`leftpad_k`", "leftpad_k=lengths"),
    "learnable_sink": ("`sinks`", "sinks=sinks"),
    "s_aux": ("`sinks`", "sinks=sinks"),
} | dict.fromkeys(
    ("return_attn_probs", "return_softmax_lse", "return_aux"), ("`return_lse`", "return_lse=True")
)  # fmt: skip


def public(function: Function) -> Function:
    """Show a function without its `*more` and `**unknown`, which it has for `refuse` alone."""
    catchalls = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    signature = inspect.signature(function)
    named = [x for x in signature.parameters.values() if x.kind not in catchalls]
    function.__signature__ = PUBLIC[function.__name__] = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return function


def refuse(function: str, more: Sequence[Any], unknown: dict[str, Any]) -> NoReturn:
    """Raise the error for positional arguments too many, or for keywords that a public function does not have."""
    parameters = PUBLIC[function].parameters
    if more:
        names = [name for name, x in parameters.items() if x.kind is inspect.Parameter.KEYWORD_ONLY]
        place = len(parameters) - len(names)
        accepted = f"{', '.join([*parameters][:place])} by position, and by name {', '.join(names)}"
        if function == "attention":
            example = mask_example(function, more[0])
        else:  # the next ones of flash_attn_varlen_func are the longest lengths
            lengths = "max_seqlen_q=longest_q, max_seqlen_k=longest_k"
            example = call_of(function, lengths if function == "attention_varlen" else "causal=True")
        raise SignatureError(f"argument {place + 1}", more[0], accepted, example)
    argument, value = next(iter(unknown.items()))
    others = [name for name, other in PUBLIC.items() if argument in other.parameters]
    if argument == "attn_mask":
        accepted = "`mask` if it is bool and `bias` if it is added to the scores, of 4 dimensions [B, Hq, Sq, Sk]"
        example = mask_example(function, value)
    elif argument in FOREIGN:
        accepted, keyword = FOREIGN[argument]
        example = call_of(function, keyword)
    elif others:
        accepted, example = f"`{argument}` in flashtile.{others[0]}", call_of(others[0])
    else:
        import difflib  # not at `import flashtile`

        similar = difflib.get_close_matches(argument, parameters, n=1)
        accepted = f"{f'`{similar[0]}`? ' if similar else ''}The arguments are {', '.join(parameters)}"
        example = call_of(function)
    raise SignatureError(argument, value, accepted, example)


def mask_example(function: str, attn_mask: Any) -> str:
    """The call that does as the `attn_mask` of PyTorch, whose leading dimensions may be absent."""
    if not isinstance(attn_mask, Tensor):
        return call_of(function, "mask=attn_mask")
    index = {2: "[None, None]", 3: "[:, None]"}.get(attn_mask.dim(), "")
    return call_of(function, argument_of(f"attn_mask{index}", attn_mask, attn_mask.dtype))


def layout_example(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """The call that works for dense tensors with too few dimensions, or in the layout `[B, S, H, D]`."""
    if q.dim() == k.dim() == v.dim() == 2:
        return "flashtile.attention(q[None, None], k[None, None], v[None, None])[0, 0]"
    if q.dim() == k.dim() == v.dim() == 3:
        packed = "flashtile.attention_varlen(q, k, v, cu_seqlens, cu_seqlens) for packed [T, H, D]"
        return f"flashtile.attention(q[:, None], k[:, None], v[:, None])[:, 0] for [B, S, D]; {packed}"
    if q.dim() == k.dim() == v.dim() == 4 and k.shape[2] > 0 and q.shape[2] % k.shape[2] == 0:
        return TRANSPOSED.format("")
    return None


TRANSPOSED = (
    "flashtile.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2){}).transpose(1, 2), "
    "if they are [B, S, H, D]"
)


def pairs_example(call: Call, name: str, x: Tensor, full: tuple[int, ...]) -> str | None:
    """The call that works with a `mask` or `bias` of another shape or dtype; `full` is `(B, Hq, Sq, Sk)`."""
    q, k = call.tensors.q, call.tensors.k
    batch, heads, seqlen_q, seqlen_k = full
    indices = {
        full: "",
        (seqlen_q, seqlen_k): "[None, None]",
        (batch, seqlen_k): "[:, None, None]",
        (batch, seqlen_q, seqlen_k): "[:, None]",
        (heads, seqlen_q, seqlen_k): "[None]",
    }
    index = next((index for shape, index in indices.items() if broadcasts_to(x, shape)), None)
    if index is not None:
        return call_of(function_of(call), argument_of(name + index, x, q.dtype))
    if call.layout == "dense" and broadcasts_to(x, (batch, q.shape[2], q.shape[1], k.shape[1])):
        return TRANSPOSED.format(f", {argument_of(name, x, q.dtype)}")
    return None


def argument_of(given: str, x: Tensor, dtype: torch.dtype) -> str:
    """The keyword that takes a tensor of scores or booleans, of whatever dtype it is."""
    if x.is_floating_point():
        return f"bias={given}" + ".to(q.dtype)" * (x.dtype not in (dtype, torch.float32))
    return f"mask={given}" + ".bool()" * (x.dtype is not torch.bool)


def function_of(call: Call) -> str:
    if call.layout == "paged" and call.tensors.cu_seqlens_q is None:
        return "attention_with_kvcache"
    return "attention" if call.layout == "dense" else "attention_varlen"


def broadcasts_to(x: Tensor, shape: tuple[int, ...]) -> bool:
    return x.dim() == len(shape) and all(n in (1, m) for n, m in zip(x.shape, shape, strict=True))
