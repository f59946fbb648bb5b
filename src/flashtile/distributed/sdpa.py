"""PyTorch's `scaled_dot_product_attention` in a context: sharded with its derivative, if flashtile's kernels run it.

The kernels that `flashtile.compat.torch.activate` registers have no graph: PyTorch differentiates its operators by
their backward operators, which know nothing of a context. So an implementation above autograd takes these operators.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import private_torch
from ..api.attention import attention
from ..api.signatures import Causal
from ..call import sharding
from ..call.eager import PLAIN
from ..errors import AttentionError
from ..locks import process_lock
from . import compiled
from .calls import Placing
from .inputs import DEFAULTS

_lock = process_lock()
_count = 0
_installed = ExitStack()


@contextmanager
def sharded_sdpa() -> Iterator[None]:
    """Make `scaled_dot_product_attention` a call of `flashtile.attention` with a derivative, if it is activated.

    PyTorch then takes flash attention alone: its other implementations would not be sharded, and it raises an error
    for calls that only those take.
    """
    active = getattr(registry, "current_flash_attention_impl", lambda: None)() == "flashtile"
    if active:
        change(1)
    try:
        yield
    finally:
        if active:
            change(-1)


def change(contexts: int) -> None:
    """Install the operators with the first context of the process, and remove them with the last."""
    global _count
    with _lock:
        before, _count = _count, _count + contexts
        if before == 0:
            _installed.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
            for key, (operator, function) in OPERATORS.items():
                library = Library("aten", "IMPL", key)
                _installed.callback(library._destroy)
                library.impl(operator, function, key)
                library.impl(f"{operator}_backward", backward_of(f"{operator}_backward"), key)
        elif _count == 0:
            _installed.close()


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
    bias = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]  # bool ones are numbers here
    return run(query, key, value, dropout_p, "top_left" if is_causal else False, scale, bias)


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
    """Of other lengths, `is_causal` is aligned to the last query and key."""
    out, lse = run(query, key, value, dropout_p, is_causal, scale, None)
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # state of dropout, which has no seed here
    return out, lse, None, None, query.shape[2], key.shape[2], state, state[0], query.new_empty(0)


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    causal: Causal,
    scale: float | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    given: dict[str, Any] = {"causal": causal, "scale": scale, "dropout_p": dropout_p}
    if type(query) in PLAIN:
        return attention(query, key, value, bias=bias, return_lse=True, **given)
    # A trace below Dynamo, which has no guard for the context: its graph looks at it.
    tensors = {"q": query, "k": key, "v": value, "mask": None, "bias": bias, "alibi_slopes": None, "sinks": None}
    return compiled.run(tensors, DEFAULTS | given, Placing(compiled.IN_CONTEXT, "contiguous", "auto", None, False))


def backward_of(operator: str) -> Callable[..., Any]:
    """PyTorch's backward operator, with an error in a context: its forward pass was recorded outside of it."""
    original = getattr(torch.ops.aten, operator).default

    def backward(*args: Any, **kwargs: Any) -> Any:
        if sharding.current() is not None:
            raise AttentionError(
                "scaled_dot_product_attention was called or compiled outside of this context_parallel.\n"
                "  accepted: backward passes of calls in the context, and functions that are first compiled in it"
            )
        with private_torch.AutoDispatchBelowAutograd():
            return original(*args, **kwargs)

    return backward


OPERATORS = {
    "AutogradCPU": ("_scaled_dot_product_flash_attention_for_cpu", sdpa_cpu),
    "AutogradCUDA": ("_scaled_dot_product_flash_attention", sdpa_cuda),
}
