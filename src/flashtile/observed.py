"""Who looks at a call, beside its kernels."""

from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import maybe_current_level
from torch.autograd import _profiler_enabled, forward_ad  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import Parameter

PLAIN = (Tensor, Parameter)


def in_forward_mode() -> bool:
    """Whether a forward-mode level is open: an operator would drop the tangent of a dual tensor without a word. Under
    nested transforms the dual may be hidden inside a wrapper, so an open level is enough.
    """
    return forward_ad._current_level >= 0


def unobserved(*tensors: Tensor | None) -> bool:
    """Whether only an operator's kernels would look at a call with these tensors, if they are `in_memory`. PyTorch
    takes longer to find that out than a call does otherwise: operators are not asked for then.

    Modes, transforms, traces and profilers look at calls. And a tensor may be more than its memory: of a subclass, or
    to be negated.
    """
    if (
        forward_ad._current_level >= 0
        or maybe_current_level() is not None
        or _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or _get_tracing_state() is not None
        or _profiler_enabled()
    ):
        return False
    for x in tensors:  # noqa: SIM110 - a generator takes longer
        if x is not None and (type(x) not in PLAIN or x.is_neg()):
            return False
    return True


# A freed tensor has its offset for an address. Allocators keep far above this; where they do not, storage is looked at.
LOWEST_ADDRESS = 2**32


def in_memory(*tensors: Tensor | None) -> bool:
    """Whether tensors have memory of their own, unlike freed ones, those of "meta", of zeros alone, and wrappers of
    transforms. Calls of one signature are alike in this.
    """
    try:
        for x in tensors:
            if x is not None and (x.is_meta or ((place := x.data_ptr()) < LOWEST_ADDRESS and not exists(x, place))):
                return False
    except RuntimeError:  # there is no address to ask for
        return False
    return True


def exists(x: Tensor, place: int) -> bool:
    """Whether there is memory behind a low address, or nothing that would need it."""
    return x.numel() == 0 or (place != 0 and x.untyped_storage().nbytes() > 0)


def freed(x: Tensor) -> bool:
    """Whether a tensor's elements are gone, as after `x.untyped_storage().resize_(0)`. Tensors that never had memory
    are not freed.
    """
    try:
        return x.data_ptr() < LOWEST_ADDRESS and x.numel() > 0 and x.untyped_storage().nbytes() == 0
    except RuntimeError:  # a transform's wrapper
        return False
