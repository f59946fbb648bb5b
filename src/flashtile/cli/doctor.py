"""`flashtile doctor`: what is wrong on this machine, and what to do; or the backends of a model of transformers."""

import importlib.util
import os
import tempfile
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .. import attention
from ..backend import user_files
from ..backend.archive import NO_ARCHIVE
from ..backend.cpu.archive import KERNELS_VARIABLE as CPU_KERNELS_VARIABLE
from ..backend.gpu.archive import KERNELS_VARIABLE, archive_for
from ..backend.gpu.installed import triton_version
from ..backend.gpu.origin import archive_in_words
from ..call.device import describe_device
from ..dispatch.status import backends
from .env import gpu_driver
from .finding import BROKEN, OK, WARNING, Finding
from .options import json_option, option, print_json

NVIDIA = Path("/dev/nvidiactl")  # there with the driver of an NVIDIA GPU
TOLERANCE = 2e-2  # for elements of bfloat16; far above its rounding, far below a mistake


def arguments(parser: ArgumentParser) -> None:
    option(
        parser,
        "--model",
        metavar="NAME_OR_PATH",
        help="Show instead which backends the attention of this model of transformers runs in, by its configuration.",
    )
    json_option(parser)


def run(*, model: str | None, as_json: bool) -> int:
    """Check device, driver, Triton, compiled kernels, the cache folder, and one small call of each backend.

    Says in plain words what is wrong, and what to do. The exit code is 1 if something is broken.
    """
    if model is not None:
        from .doctor_model import examined

        findings = list(examined(model))
    else:
        findings = [finding for check in CHECKS for finding in attempted(check)]
    broken = any(finding.state == BROKEN for finding in findings)
    if as_json:
        print_json({"broken": broken, "findings": [finding._asdict() for finding in findings]})
    else:
        for finding in findings:
            print(f"{finding.state:8} {finding.check}: {finding.words}")
            if finding.advice:
                print(f"{'':8} {finding.advice}")
        print("something is broken" if broken else "nothing is broken")
    return 1 if broken else 0


def attempted(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check. One that fails is a finding too."""
    try:
        yield from check()
    except Exception as error:  # an unusual machine's
        words = f"the check failed: {type(error).__name__}: {error}"
        yield Finding(
            f"the check of {check.__name__}", BROKEN, words, "please report this, with the output of `flashtile env`"
        )


# Checks ---------------------------------------------------------------------------------------------------------------


def device() -> Iterator[Finding]:
    """GPUs that PyTorch can use, or why it cannot use one that is there."""
    build = torch.version.cuda or torch.version.hip
    for n in range(torch.cuda.device_count()):
        found = describe_device(torch.device("cuda", n))
        yield Finding("device", OK, f"{found.name}, {found.arch}")
    if torch.cuda.device_count():
        yield Finding("driver", OK, gpu_driver() or "unknown")
    elif NVIDIA.exists() and build is None:
        yield Finding(
            "device",
            BROKEN,
            f"there is an NVIDIA GPU, but PyTorch {torch.__version__} is a build for CPUs",
            "install a CUDA build: the installation page of pytorch.org has the command",
        )
    elif NVIDIA.exists():
        yield Finding(
            "device",
            BROKEN,
            f"there is an NVIDIA GPU, but PyTorch (CUDA {build}) cannot use it",
            "run `nvidia-smi`: the driver may be older than this CUDA, or CUDA_VISIBLE_DEVICES may hide the GPU",
        )
    else:
        yield Finding("device", OK, "no GPU; calls run on the CPU")


def triton() -> Iterator[Finding]:
    version = triton_version()
    if version is not None:
        yield Finding("Triton", OK, ".".join(map(str, version)))
    elif torch.cuda.device_count():
        advice = "`pip install triton`; PyTorch's CUDA builds for Linux bring it along"
        yield Finding("Triton", BROKEN, "not installed: no kernel can be compiled for the GPU", advice)
    else:
        yield Finding("Triton", OK, "not installed, and not needed without a GPU")


def kernels() -> Iterator[Finding]:
    """The archives of kernels that were compiled ahead."""
    for variable, options in ((CPU_KERNELS_VARIABLE, "--cpu "), (KERNELS_VARIABLE, "")):
        configured = os.environ.get(variable)
        if configured not in (None, "", NO_ARCHIVE) and not Path(str(configured)).is_file():
            yield Finding(
                "kernels",
                BROKEN,
                f"{variable}={configured}: there is no such file",
                f"unset {variable}, or make the archive by `flashtile build-kernels {options}--out {configured}`",
            )
            return
    for arch in sorted({describe_device(torch.device("cuda", n)).arch for n in range(torch.cuda.device_count())}):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ahead = archive_for(arch)
        if told:
            advice = "kernels are compiled at first use; install a wheel whose kernels were made for this version"
            yield Finding("kernels", WARNING, str(told[0].message).splitlines()[0], advice)
        else:
            words = archive_in_words(arch) if ahead else "compiled by Triton when a call first needs them"
            advice = "`flashtile prepare` compiles those of a workload ahead"
            yield Finding("kernels", OK, f"{arch}: {words}", "" if ahead else advice)
    if not torch.cuda.device_count():
        yield Finding("kernels", OK, "no kernels for a GPU are needed")


def cache() -> Iterator[Finding]:
    folder = user_files.directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        advice = f"every process compiles its kernels again; set {user_files.CACHE_VARIABLE} to a folder of yours"
        yield Finding("cache", WARNING, f"{folder} cannot be written: {error.strerror}", advice)
        return
    files = [x.size for x in user_files.entries()]
    yield Finding("cache", OK, f"{folder}: {len(files)} files, {sum(files) / 10**6:.1f} MB")


def calls() -> Iterator[Finding]:
    """One small call of each usable backend, forward and backward, against `reference`; and one without a name."""
    for status in backends():
        if not status.usable:
            yield Finding(f"backend {status.name}", OK, f"not used: {status.reason}")
        elif status.name != "reference":
            yield called(status.name)
    yield called("auto")


def called(backend: str) -> Finding:
    """A call of a backend on the device that it is for."""
    name = f"backend {backend}" if backend != "auto" else "a plain call"
    gpu = torch.cuda.device_count() > 0 and backend not in ("cpu", "reference")
    place = torch.device("cuda" if gpu else "cpu")
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 96, 64, generator=generator).to(place, torch.bfloat16) for _ in range(4))
    try:
        found, right = (results(q, k, v, dout, which) for which in (backend, "reference"))
        off = max(float((x.float() - y.float()).abs().max()) for x, y in zip(found, right, strict=True))
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return Finding(name, BROKEN, f"{type(error).__name__}: {lines[0]}", advice_on(backend))
    if not off <= TOLERANCE:
        return Finding(name, BROKEN, f"its results are off by {off:.3g}", advice_on(backend))
    return Finding(name, OK, f"right, forward and backward, on {describe_device(place).name}")


def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, backend: str) -> list[torch.Tensor]:
    """out `[1, 2, 96, 64]`, and the gradients of q, k and v."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, causal=True, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def advice_on(backend: str) -> str:
    other: dict[str, Any] = {"cpu": "`pip install --force-reinstall llvmlite`", "auto": "see the lines above"}
    if importlib.util.find_spec("triton") is not None:
        other |= dict.fromkeys(("triton", "hopper"), "remove Triton's cache, `~/.triton/cache`, and try again")
    report = "else please report it, with the output of `flashtile env`"
    return f"{other[backend]}; {report}" if backend in other else report.removeprefix("else ")


CHECKS = (device, triton, kernels, cache, calls)
