"""Run this project's Triton kernels as an older NVIDIA chip would get them: compiled to PTX of its architecture, which
the driver compiles for the GPU at hand.

PTX of sm_80 has mma.sync and cp.async, and nothing newer. What it shows: that the code is right, and how it compares
with other code of that architecture on the same GPU. What it does not show: another chip's clocks, caches, memory and
register allocation.
"""

import os
from typing import Any

import torch

from .backend.gpu.chips import MMA_SYNC, SHARED_MEMORY
from .call import device

ARCHITECTURES = ("sm_80", "sm_86", "sm_89")
ARCH_VARIABLE = "FLASHTILE_AS_ARCH"  # set for processes that commands start


def install(arch: str) -> None:
    """Let all kernels of this process, and of those that it starts, be compiled for `arch`.

    Raises:
        RuntimeError: no GPU of NVIDIA here is newer than `arch`, or a kernel was already compiled.
    """
    assert arch in MMA_SYNC, arch
    if torch.version.hip or not torch.cuda.is_available():
        raise RuntimeError(f"kernels for {arch} run on a GPU of NVIDIA, and there is none")
    major, minor = torch.cuda.get_device_capability()
    if major * 10 + minor < int(arch.removeprefix("sm_")):
        raise RuntimeError(f"this GPU is sm_{major}{minor}, which is older than {arch}")
    if device._describe.cache_info().currsize:
        raise RuntimeError("calls have already been planned for this GPU: start another process")
    os.environ[ARCH_VARIABLE] = arch
    compile_to_ptx(arch)
    describe = device._describe.__wrapped__

    def pretended(kind: str, index: int, threads: int) -> device.Device:
        found = describe(kind, index, threads)
        return found._replace(arch=arch, name=f"{arch} on {found.name}") if kind == "cuda" else found

    device._describe = pretended  # type: ignore[assignment]


def install_inherited() -> None:
    """As `install`, in a process that was started by one that did."""
    arch = os.environ.get(ARCH_VARIABLE)
    if arch is not None:
        install(arch)


def compile_to_ptx(arch: str) -> None:
    """Let Triton compile to PTX of an architecture, within the shared memory that it has."""
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.backends.nvidia import compiler  # pyright: ignore[reportMissingImports]
    from triton.runtime import driver  # pyright: ignore[reportMissingImports]

    active: Any = driver.active
    backend: Any = compiler.CUDABackend
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    properties = active.utils.get_device_properties
    most = {"max_shared_mem": SHARED_MEMORY[arch] * 1024}

    def make_cubin(self: Any, source: str | bytes, metadata: Any, options: Any, capability: int) -> bytes:
        """The text, which ends with a zero."""
        return (source.encode() if isinstance(source, str) else source) + b"\0"

    active.get_current_target = lambda: target
    active.utils.get_device_properties = lambda index: {**properties(index), **most}
    backend.make_cubin = make_cubin
    compile_with_inductor(divmod(target.arch, 10))


def compile_with_inductor(capability: tuple[int, int]) -> None:
    """Let `torch.compile` choose its Triton kernels for a capability, and compile them in this process."""
    from torch._inductor import config

    torch.cuda.get_device_capability = lambda device=None: capability
    config.compile_threads = 1
    config.use_static_cuda_launcher = False  # it loads files of machine code
    config.fx_graph_cache = False  # its keys do not have the capability
