"""The CUDA driver, as far as loading and launching compiled kernels needs it, through ctypes.

NVIDIA's `cuda.bindings.driver` has the same functions, but importing it takes 0.1 s, and not every PyTorch brings it.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from ctypes import c_char, c_int, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch

from ...private_torch import current_raw_stream

LIBRARY = "libcuda.so.1"
INVALID_CONTEXT, INVALID_HANDLE = 201, 400
DEFAULT_SHARED = 48 * 1024  # bytes that a kernel may have without asking
SHARED_PER_BLOCK_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
MAX_THREADS, STATIC_SHARED, DYNAMIC_SHARED, NON_PORTABLE_CLUSTER = 0, 1, 8, 14  # CU_FUNC_ATTRIBUTE_*
PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
COOPERATIVE, CLUSTER, CLUSTER_SCHEDULING, PROGRAMMATIC = 2, 4, 5, 6  # CU_LAUNCH_ATTRIBUTE_*
SPREAD = 1  # CU_CLUSTER_SCHEDULING_POLICY_SPREAD
PORTABLE_CLUSTER = 8  # blocks
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
L2_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
MAP_BYTES, MAP_ALIGNMENT = 128, 64


# INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX, UNSUPPORTED_PTX_VERSION, INVALID_SOURCE, NOT_FOUND
NOT_RUNNABLE = (200, 209, 218, 222, 300, 500)


class DriverError(RuntimeError):
    """An error of the CUDA driver."""


class NotRunnableError(DriverError):
    """Machine code that this driver or device cannot run: of another architecture, or newer than the driver."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute; `value` is a union of 64 bytes."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", c_uint),
    )


class TensorMap:
    """Memory of a CUtensorMap."""

    def __init__(self) -> None:
        self.memory = (c_char * (MAP_BYTES + MAP_ALIGNMENT))()
        self.address = -(-ctypes.addressof(self.memory) // MAP_ALIGNMENT) * MAP_ALIGNMENT


class MapLayout(NamedTuple):
    """The part of a tensor map that a kernel is compiled for, in the driver's numbers."""

    swizzle: int
    element_type: int
    element_size: int
    box: Sequence[int]


class Driver:
    """Functions of `libcuda`."""

    device = staticmethod(torch.cuda.current_device)
    stream = staticmethod(current_raw_stream)

    def __init__(self) -> None:
        self.library = ctypes.CDLL(LIBRARY)
        self.launch_kernel: Any = self.library.cuLaunchKernelEx
        self.encode_tiled: Any = self.library.cuTensorMapEncodeTiled

    def check(self, code: int, doing: str) -> None:
        """Raise an error for a result that is none of success.

        Raises:
            DriverError: `code` is not 0.
        """
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(text))
            kind = NotRunnableError if code in NOT_RUNNABLE else DriverError
            raise kind(f"CUDA error {code} ({(text.value or b'unknown').decode()}) while {doing}")

    def context(self) -> int:
        """The current context. A thread that has none gets the primary one of PyTorch's current device."""
        context = c_void_p()
        self.check(self.library.cuCtxGetCurrent(ctypes.byref(context)), "asking for the context")
        if not context.value:
            device = c_int()
            self.check(self.library.cuDeviceGet(ctypes.byref(device), self.device()), "finding a device")
            self.check(self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "making a context")
            self.check(self.library.cuCtxSetCurrent(context), "setting the context")
        return context.value or 0

    def load(self, image: bytes, name: str, threads: int, shared: int, cluster: int) -> int:
        """Load a kernel into the current context: the handle of its function.

        Raises:
            NotRunnableError: the driver or the device cannot run it.
        """
        module, function, device = c_void_p(), c_void_p(), c_int()
        cuda = self.library
        with self.captures_allowed():
            self.check(cuda.cuModuleLoadData(ctypes.byref(module), image), f"loading {name}")
            self.check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding {name}")
            self.check(cuda.cuCtxGetDevice(ctypes.byref(device)), "asking for the device")
            optin = self.number(cuda.cuDeviceGetAttribute, SHARED_PER_BLOCK_OPTIN, device)
            if shared > optin:
                raise NotRunnableError(f"{name} needs {shared} bytes of shared memory, more than the device's {optin}")
            if threads > self.number(cuda.cuFuncGetAttribute, MAX_THREADS, function):  # also loads a lazy module
                raise NotRunnableError(f"{name} needs {threads} threads, more than it may have on this device")
            if shared > DEFAULT_SHARED:
                static = self.number(cuda.cuFuncGetAttribute, STATIC_SHARED, function)
                self.check(cuda.cuFuncSetCacheConfig(function, PREFER_SHARED), f"configuring {name}")
                self.check(cuda.cuFuncSetAttribute(function, DYNAMIC_SHARED, optin - static), f"configuring {name}")
            if cluster > PORTABLE_CLUSTER:
                self.check(cuda.cuFuncSetAttribute(function, NON_PORTABLE_CLUSTER, 1), f"configuring {name}")
        return function.value or 0

    def number(self, query: Any, attribute: int, of: Any) -> int:
        found = c_int()
        self.check(query(ctypes.byref(found), attribute, of), "asking for an attribute")
        return found.value

    @contextlib.contextmanager
    def captures_allowed(self) -> Iterator[None]:
        """Let this thread load modules while a stream is captured."""
        mode = c_int(RELAXED)
        self.check(self.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "changing the capture mode")
        try:
            yield
        finally:
            self.check(self.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "changing the capture mode")

    def tensor_map(self, layout: MapLayout, address: int, shape: Sequence[int], strides: Sequence[int]) -> TensorMap:
        """Encode the tensor map of a tensor with these sizes and strides, in elements; the last stride is 1."""
        rank, size = len(shape), layout.element_size
        made = TensorMap()
        outer = [stride * size % 2**64 for stride in strides[-2::-1]]
        code = self.encode_tiled(
            c_void_p(made.address), layout.element_type, c_uint32(rank), c_void_p(address),
            (c_uint64 * rank)(*shape[::-1]), (c_uint64 * rank)(*outer), (c_uint32 * rank)(*layout.box[::-1]),
            (c_uint32 * rank)(*[1] * rank), 0, layout.swizzle, L2_128B, 0,
        )  # fmt: skip
        self.check(code, f"encoding a tensor map of {list(shape)} with strides {list(strides)}, boxes {layout.box}")
        return made


def attributes_of(programmatic: bool, cooperative: bool, cluster: int) -> Any:
    """Launch attributes, in the order in which Triton sets them: an array, or `None`."""
    wanted: list[tuple[int, tuple[int, ...]]] = []
    wanted += [(PROGRAMMATIC, (1,))] if programmatic else []
    wanted += [(COOPERATIVE, (1,))] if cooperative else []
    wanted += [(CLUSTER, (cluster, 1, 1)), (CLUSTER_SCHEDULING, (SPREAD,))] if cluster != 1 else []
    if not wanted:
        return None
    return (LaunchAttribute * len(wanted))(*[LaunchAttribute(n, 0, (c_uint * 16)(*value)) for n, value in wanted])


@functools.cache
def driver() -> Driver:
    """The driver of this process.

    Raises:
        OSError, AttributeError: there is none, or it is too old for these kernels.
    """
    return Driver()
