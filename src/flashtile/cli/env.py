"""`flashtile env`: the machine as flashtile sees it. A fact that cannot be read is listed with the reason."""

import importlib.metadata
import os
import platform
import subprocess
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

import torch

from .. import __version__
from ..as_arch import ARCH_VARIABLE
from ..backend.cpu import archive as cpu_archive
from ..backend.cpu.targets import VECTORS_VARIABLE
from ..backend.gpu.archive import KERNELS_VARIABLE
from ..backend.gpu.origin import archive_in_words
from ..backend.user_files import CACHE_VARIABLE
from ..call.device import describe_device
from ..dispatch.observed import LOG_VARIABLE
from ..dispatch.planner import BACKEND_VARIABLE
from ..dispatch.status import backends
from .options import json_option, print_json

PACKAGES = ("numpy", "triton", "llvmlite", "numba", "matplotlib", "flash_attn")
VARIABLES = (
    BACKEND_VARIABLE,
    CACHE_VARIABLE,
    VECTORS_VARIABLE,
    KERNELS_VARIABLE,
    cpu_archive.KERNELS_VARIABLE,
    LOG_VARIABLE,
    ARCH_VARIABLE,
)


def arguments(parser: ArgumentParser) -> None:
    json_option(parser)


def run(as_json: bool) -> None:
    """The machine: Python, CPU, GPUs, PyTorch, and which backends are usable.

    Never fails. Put its output into a bug report.
    """
    facts, unknown = survey()
    if as_json:
        print_json(facts | {"unknown": unknown})
        return
    for name, value in facts.items():
        for n, line in enumerate(lines(value)):
            print(f"{'' if n else name:16}{line}")
    for name, reason in unknown.items():
        print(f"{name:16}not found out: {reason}")


def survey() -> tuple[dict[str, Any], dict[str, str]]:
    """Results of the probes, and the reasons of those that failed."""
    facts: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for name, probe in PROBES.items():
        try:
            facts[name] = probe()
        except Exception as error:  # an unusual machine's
            unknown[name] = f"{type(error).__name__}: {error}"
    return facts, unknown


def lines(value: Any) -> list[str]:
    """A value as lines of text."""
    if isinstance(value, dict):
        return [f"{name}: {'-' if x is None else x}" for name, x in value.items()]
    if isinstance(value, list):
        return [", ".join(lines(x)) for x in value] or ["none"]
    return ["-" if value is None else str(value)]


def cpu_name() -> str:
    if platform.system() == "Linux":
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.machine()
    if platform.system() == "Darwin":
        return output_of("sysctl", "-n", "machdep.cpu.brand_string")
    return platform.processor()


def memory() -> str:
    return gibibytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def torch_build() -> dict[str, Any]:
    return {"version": torch.__version__, "CUDA": torch.version.cuda, "HIP": torch.version.hip}


def gpus() -> list[dict[str, Any]]:
    devices = []
    for index in range(torch.cuda.device_count()):
        device = describe_device(torch.device("cuda", index))
        total = torch.cuda.get_device_properties(index).total_memory
        devices.append({"name": device.name, "arch": device.arch, "cores": device.cores, "memory": gibibytes(total)})
    return devices


def gpu_driver() -> str | None:
    if torch.cuda.device_count() == 0:
        return None
    if torch.version.hip:
        with open("/sys/module/amdgpu/version") as file:
            return file.read().strip()
    return output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]


def packages() -> dict[str, str | None]:
    """Versions of installed packages, without importing them; `None` if one is not installed."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in PACKAGES}


def usable_backends() -> dict[str, str]:
    return {
        status.name: f"usable ({status.summary})" if status.usable else f"not usable: {status.reason}"
        for status in backends()
    }


def kernels() -> list[str]:
    """The origin of the kernels for each GPU's architecture."""
    devices = (describe_device(torch.device("cuda", n)) for n in range(torch.cuda.device_count()))
    return [f"{arch}: {archive_in_words(arch)}" for arch in sorted({device.arch for device in devices})]


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


PROBES: dict[str, Callable[[], Any]] = {
    "flashtile": lambda: __version__,
    "python": lambda: f"{platform.python_implementation()} {platform.python_version()}",
    "platform": platform.platform,
    "cpu": cpu_name,
    "cpu cores": os.cpu_count,
    "cpu capability": torch.backends.cpu.get_cpu_capability,
    "torch threads": torch.get_num_threads,
    "memory": memory,
    "torch": torch_build,
    "gpus": gpus,
    "gpu driver": gpu_driver,
    "packages": packages,
    "backends": usable_backends,
    "cpu kernels": cpu_archive.in_words,
    "gpu kernels": kernels,
    "variables": lambda: {name: os.environ.get(name) for name in VARIABLES},
}
