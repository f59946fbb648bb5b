"""Private names of PyTorch, which a release may rename: each stands here once, with a fallback.

A fallback is slower or more careful, never wrong. Those that look for modes, transforms and traces report one that may
be there: calls then go through PyTorch's dispatcher. Names are read as attributes of this module, so that tests can
replace them.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import AttentionError

Function = TypeVar("Function", bound=Callable[..., Any])
AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


def find(path: str, name: str, fallback: Any) -> Any:
    """The attribute `name` of `path`, a module or a name in one; the fallback where there is none."""
    try:
        return getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError):
        return fallback


# Modes, traces and transforms around a call ---------------------------------------------------------------------------


def one(*_: Any) -> int:
    return 1


def true(*_: Any) -> bool:
    return True


def nothing(*_: Any) -> None:
    return None


def traced() -> bool | None:
    return torch.jit.is_tracing() or None  # pyright: ignore[reportPrivateImportUsage]


maybe_current_level = find("torch._C._functorch", "maybe_current_level", one)  # None outside of torch.func
is_batchedtensor = find("torch._C._functorch", "is_batchedtensor", one)
len_torch_dispatch_stack = find("torch._C", "_len_torch_dispatch_stack", one)
len_torch_function_stack = find("torch._C", "_len_torch_function_stack", one)
get_function_stack_at = find("torch._C", "_get_function_stack_at", nothing)
if len_torch_function_stack is one:  # there may be no mode to get
    get_function_stack_at = nothing
get_tracing_state = find("torch._C", "_get_tracing_state", traced)
profiler_enabled = find("torch.autograd", "_profiler_enabled", true)
is_functorch_wrapped_tensor = find("torch._C._functorch", "is_functorch_wrapped_tensor", true)
DeviceContext = find("torch.utils._device", "DeviceContext", type)  # no mode has this type
DisableTorchFunction = find("torch._C", "DisableTorchFunction", None)


def without_torch_function() -> AbstractContextManager[Any]:
    """A context in which no mode and no subclass sees calls of torch functions, if there is such a thing."""
    return nullcontext() if DisableTorchFunction is None else DisableTorchFunction()


def any_autocast() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in AUTOCAST_DEVICES)


is_deterministic = find("torch._C", "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)
is_any_autocast_enabled = find("torch._C", "_is_any_autocast_enabled", any_autocast)


def level_by_trial() -> int:
    """0 if a forward-mode level is open, else -1: outside of a level there are no dual tensors."""
    try:
        torch.autograd.forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
    except RuntimeError:
        return -1
    return 0


_forward_ad = torch.autograd.forward_ad


def level_of_pytorch() -> int:
    return _forward_ad._current_level


forward_level = (
    level_by_trial if find("torch.autograd.forward_ad", "_current_level", None) is None else level_of_pytorch
)
# A context in which forward mode computes tangents; an autograd.Function has switched that off.
_set_forward_mode: Any = find("torch.autograd.forward_ad", "_set_fwd_grad_enabled", None)
forward_mode: Callable[[], AbstractContextManager[Any]] = (
    nullcontext if _set_forward_mode is None else functools.partial(_set_forward_mode, True)
)
is_forward_mode_enabled = find("torch._C", "_is_fwd_grad_enabled", true)
_eager_transforms: Any = find("torch._functorch", "eager_transforms", None)


def in_jvp() -> bool:
    """Whether torch.func.jvp is around this, in forward mode: then it can open another level."""
    nesting = getattr(_eager_transforms, "JVP_NESTING", None)
    return maybe_current_level() is not None if nesting is None else nesting > 0


_interpreter_stack: Any = find("torch._C._functorch", "get_interpreter_stack", nothing)
_FUNCTIONALIZE: Any = getattr(find("torch._C._functorch", "TransformType", None), "Functionalize", None)


def only_functionalize() -> bool:
    """Whether torch.func.functionalize is around this, and no other transform; False where that cannot be known."""
    levels = _interpreter_stack() or ()
    return len(levels) > 0 and all(level.key() == _FUNCTIONALIZE for level in levels)


_JVP: Any = getattr(find("torch._C._functorch", "TransformType", None), "Jvp", None)


def innermost_is_forward() -> bool:
    """Whether the innermost transform is forward mode, so that `unpack_dual` gives the tangents of an open level; False
    where that cannot be known.
    """
    if maybe_current_level() is None:
        return True
    levels = _interpreter_stack() or ()
    return len(levels) > 0 and _JVP is not None and levels[-1].key() == _JVP


# Tensors that `torch.autograd.grad(..., is_grads_batched=True)` batches.
BATCH_LEVELS = range(1, 65)
add_batch_dim = find("torch", "_add_batch_dim", None)
remove_batch_dim = find("torch", "_remove_batch_dim", None)
is_legacy_batchedtensor = find("torch._C._functorch", "is_legacy_batchedtensor", nothing)
if add_batch_dim is None or remove_batch_dim is None:
    is_legacy_batchedtensor = nothing  # autograd raises an error


# Autograd and the dispatcher ------------------------------------------------------------------------------------------

unwrap_if_dead = find("torch._C._functorch", "unwrap_if_dead", None)
# Autograd below which an operator runs again; None where it cannot, and an operator has no implementation for it.
AutoDispatchBelowAutograd = find("torch._C", "_AutoDispatchBelowAutograd", None)
set_grad_enabled: Callable[[bool], Any] = find("torch._C", "_set_grad_enabled", torch.set_grad_enabled)
_DISPATCH_NAMES = (
    "DispatchKey", "DispatchKeySet", "_dispatch_tls_is_dispatch_key_excluded", "_dispatch_tls_local_exclude_set",
    "_dispatch_tls_local_include_set", "_ForceDispatchKeyGuard",
)  # fmt: skip
_DISPATCH: Any = tuple(find("torch._C", name, None) for name in _DISPATCH_NAMES)
_DISPATCH = None if any(x is None for x in _DISPATCH) else _DISPATCH
# Whether an operator's own work can be differentiated in forward mode; without that, forward mode is composed.
differentiates_inside_operators = not any(x is None for x in (_DISPATCH, _set_forward_mode, AutoDispatchBelowAutograd))
_ONE_LEVEL = hasattr(torch.autograd.Function.__base__, "apply") and unwrap_if_dead is not None


def apply_at_one_level(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its binding of arguments and its search for transforms, if there is such a thing."""
    return super(torch.autograd.Function, function).apply if _ONE_LEVEL else function.apply  # type: ignore[misc]


# A context in which torch.func lets a function be applied at one of its levels.
single_level: Callable[[], AbstractContextManager[Any]] = find(
    "torch._functorch.utils", "enable_single_level_autograd_function", nullcontext
)


def skip_lookup_of_backward(function: type[torch.autograd.Function]) -> None:
    """Let autograd's node call `function.backward` itself, in place of a method that looks for it in each pass."""
    node = getattr(function, "_backward_cls", None)
    if node is not None and hasattr(node, "apply"):
        node.apply = function.backward


def argument_names(operator: Any) -> list[str]:
    return [argument.name for argument in operator._schema.arguments]


def below_autograd() -> bool:
    """Whether operations leave autograd out here, as inside an operator; False where that cannot be known."""
    return _DISPATCH is not None and _DISPATCH[2](_DISPATCH[0].AutogradFunctionality)


def with_autograd() -> AbstractContextManager[Any] | None:
    """A context in which autograd is not left out; `None` where it is not, or cannot be brought back: then
    `recording_graph` raises an error.
    """
    if _DISPATCH is None:
        return None
    key, key_set, _, excluded, included, guard = _DISPATCH
    # Forward mode makes tensors of zeros without memory, which no kernel can read below the last key.
    keys, exclude = (key.AutogradFunctionality, key.ADInplaceOrView, key.ZeroTensor), excluded()
    if not any(exclude.has(x) for x in keys):
        return None
    for x in keys:
        exclude = exclude - key_set(x)
    return guard(included(), exclude)


@contextmanager
def recording_graph() -> Iterator[None]:
    """torch.enable_grad(), for a backend that differentiates a tile.

    Raises:
        AttentionError: autograd is left out here, as inside an operator, and this PyTorch cannot bring it back.
    """
    with torch.enable_grad():
        if _DISPATCH is None and not (torch.zeros((), requires_grad=True) * 1).requires_grad:
            raise AttentionError(
                f"a backend that uses torch.autograd runs inside an operator; PyTorch {torch.__version__} offers no "
                "way back.\n  accepted: another backend, or the call outside of compiled programs, modes and profilers"
            )
        yield


# A thread's values, which autograd's threads have during a backward pass that the thread starts.
_STASH_NAMES = "_stash_obj_in_tls", "_get_obj_in_tls", "_is_key_in_tls"
_stash: Any = tuple(find("torch._C", name, None) for name in _STASH_NAMES)
_stash = None if any(x is None for x in _stash) else _stash


def stash_in_thread(key: str, value: Any) -> None:
    if _stash is None:
        raise AttentionError(
            f"PyTorch {torch.__version__} has no values that autograd's threads inherit, which context_parallel needs."
            "\n  accepted: flashtile.distributed.attention, or another PyTorch"
        )
    _stash[0](key, value)


def stashed_in_thread(key: str) -> Any:
    """The value of this thread, or `None`."""
    return _stash[1](key) if _stash is not None and _stash[2](key) else None


# Compilation and memory -----------------------------------------------------------------------------------------------

_eval_frame: Any = find("torch._C._dynamo", "eval_frame", None)
guards: Any = find("torch._C._dynamo", "guards", None)  # allocators and guards of compiled programs
clear_cublas_workspaces = find("torch._C", "_cuda_clearCublasWorkspaces", nothing)


def skip_frames(code: Any) -> bool:
    """Make Dynamo leave the frames of `code` alone, and all below them; False where it must be asked otherwise."""
    try:
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))
    except AttributeError:
        return False
    return True


def constant_result(function: Function) -> Function:
    """Mark a function whose result is a constant of a compiled graph, as `torch.compiler.assume_constant_result` does,
    which would import Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def known(condition: Any) -> bool:
    """Whether a condition of numbers holds. That of a trace's symbols does if it follows from what is known of them: no
    guard is added, which would make a graph, or an exported program, one for some numbers only.
    """
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def real_object(x: Any) -> Any:
    """The object that Dynamo passes to such a function in a wrapper (PyTorch 2.13)."""
    return getattr(x, "real_obj", x)


def stream_of_object(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


is_capturing: Callable[[], bool] = find(
    "torch._C", "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
current_device: Callable[[], int] = find("torch._C", "_cuda_getDevice", torch.cuda.current_device)
# The current stream of a device, as an integer, without the object that takes longer to make than a launch.
current_raw_stream: Callable[[int], int] = find("torch._C", "_cuda_getCurrentRawStream", stream_of_object)


def allocator(device_type: str) -> Any:
    """The function `(shape, strides, dtype) -> Tensor` of compiled programs on a device; `None` without one."""
    return getattr(guards, f"_empty_strided_{device_type}", None) if device_type in ("cpu", "cuda") else None


def tensor_guard(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """The function of compiled programs that tells whether other tensors have the types, shapes, strides, dtypes,
    devices and dispatch keys of these; `None` without one.
    """
    try:
        return guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check  # type: ignore[no-any-return]
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None


# Implementations of scaled_dot_product_attention ----------------------------------------------------------------------

# None where PyTorch has no order of implementations: its own stays.
get_sdp_priority_order = find("torch._C", "_get_sdp_priority_order", None)
set_sdp_priority_order = find("torch._C", "_set_sdp_priority_order", None)
fused_sdp_choice = find("torch", "_fused_sdp_choice", None)


has_kernel: Callable[[str, str], bool] = find("torch._C", "_dispatch_has_kernel_for_dispatch_key", true)
get_kernel = find("torch.library", "get_kernel", None)


def registered_kernel(operator: str, key: str) -> Callable[..., Any] | None:
    """The kernel that an operator has at a dispatch key now, which can be called when another one has taken its place.
    `None` where there is none, or PyTorch cannot give it.
    """
    if get_kernel is None or _DISPATCH is None or not has_kernel(operator, key):
        return None
    keys = _DISPATCH[1](getattr(_DISPATCH[0], key))
    return functools.partial(get_kernel(operator, key).call_boxed, keys)


# Examined functions ---------------------------------------------------------------------------------------------------


class NoDispatchMode:
    """In place of `TorchDispatchMode`."""

    def __init__(self) -> None:
        raise AttentionError(
            f"a score_mod cannot be examined with PyTorch {torch.__version__}, which has no TorchDispatchMode.\n"
            "  accepted: attention without score_mod, or another PyTorch"
        )


def leaves(tree: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dictionaries."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [x for part in tree for x in leaves(part)] if isinstance(tree, tuple | list) else [tree]


# Makes a tensor subclass without memory; None where there are none, and masks of transformers are dense.
make_wrapper_subclass: Any = getattr(torch.Tensor, "_make_wrapper_subclass", None)
TorchDispatchMode: Any = find("torch.utils._python_dispatch", "TorchDispatchMode", NoDispatchMode)
tree_leaves = find("torch.utils._pytree", "tree_leaves", leaves)


@functools.cache
def operator_types() -> tuple[type, ...]:
    """The types of an operator and of its overloads."""
    return type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)


def storage_of(x: Tensor) -> int:
    """A number for the storage of a tensor, which no other that lives at the same time has."""
    storage = x.untyped_storage()
    return getattr(storage, "_cdata", None) or storage.data_ptr()


def batched_like(x: Tensor, others: Sequence[Tensor]) -> Tensor:
    """`x`, vmapped where one of the others is: torch.func does not look into an optional list (torch 2.13)."""
    if maybe_current_level() is not None:
        for other in others:
            if is_batchedtensor(other):
                return torch.where(other.new_zeros((), dtype=torch.bool), x, x)
    return x
