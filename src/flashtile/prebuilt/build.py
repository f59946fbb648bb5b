"""Compilation of the standard set into an archive, by the pinned Triton, on a machine that needs no GPU."""

import contextlib
import hashlib
import importlib.metadata
import io
import itertools
import json
import multiprocessing
import signal
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..backend.archive import FORMAT, INDEX
from ..backend.gpu.archive import ALSO_FOR, sources
from ..backend.gpu.installed import triton_version
from ..backend.gpu.kernel import function_under_jit
from ..backend.gpu.replay import Launch
from ..backend.gpu.signature import CONSTANT, PLAIN, SPECIALIZED, key_of
from .cubin import without_debug
from .launches import all_launches, devices_of
from .standard import StandardCall, standard_calls
from .sweeps import sweep_calls

# In a wheel's order; sm_89 runs the code of sm_86.
ARCHITECTURES = ("sm_90", "sm_80", "sm_86", "sm_120", "sm_100")
PINNED = (3, 6)  # the version of Triton whose machine code is measured
PROGRESS = 50  # kernels from one line to the next
SCRATCH_ALIGNMENT = 512  # bytes, of PyTorch's allocations
SAME_DATE = (1980, 1, 1, 0, 0, 0)  # so that equal kernels make equal files


class BuildError(RuntimeError):
    """An archive cannot be made here."""


class Compiled(NamedTuple):
    """One binary of a kernel, its entry in the index, and the kernel's parameters."""

    title: str
    parameters: list[tuple[str, str]]
    key: str
    facts: dict[str, Any]
    image: bytes


def build(arch: str, out: Path, jobs: int, only: str, sweeps: Sequence[Path], progress: Callable[[str], None]) -> int:
    """Compile the kernels of the standard set and of sweeps, those whose title contains `only`, and write the archive;
    returns the number of binaries.

    Raises:
        BuildError: another Triton is installed, or an architecture that has no archive is requested.
        ValueError: a file is no sweep.
    """
    if triton_version() != PINNED:
        other = ".".join(map(str, triton_version() or ())) or "none"
        wanted = ".".join(map(str, PINNED))
        raise BuildError(f"archives are compiled by Triton {wanted}; installed: {other}")
    if not arch.startswith("sm_"):
        raise BuildError(f"archives are for NVIDIA GPUs, such as sm_90, not for {arch}")
    needed = [x for x in distinct(needed_launches(arch, sweeps)) if only in x.kernel.title]
    found: list[Compiled] = []
    with compilers(needed, arch, jobs) as compiled:
        for one in compiled:
            found.append(one)
            if len(found) % PROGRESS == 0:
                progress(f"{arch}: {len(found)} of {len(needed)} kernels")
    write(out, arch, importlib.metadata.version("triton"), found)
    return len(found)


def calls(sweeps: Sequence[Path]) -> Iterator[StandardCall]:
    return itertools.chain(standard_calls(), *(sweep_calls(path) for path in sweeps))


def needed_launches(arch: str, sweeps: Sequence[Path]) -> Iterator[Launch]:
    """The launches on the chips of an architecture, and of those that run its code."""
    for one in (arch, *(other for other, code in ALSO_FOR.items() if code == arch)):
        for device in devices_of(one):
            yield from all_launches(calls(sweeps), device)


@contextlib.contextmanager
def compilers(needed: list[Launch], arch: str, jobs: int) -> Iterator[Iterable[Compiled]]:
    """The kernels of launches, compiled by `jobs` processes that share this one's launches: these cannot be sent."""
    if jobs == 1:
        yield (compile_launch(launch, arch) for launch in needed)
        return
    _work[:] = [(launch, arch) for launch in needed]
    with multiprocessing.get_context("fork").Pool(jobs, unhandled_signals) as pool:
        yield pool.imap_unordered(compile_of_work, range(len(needed)))


_work: list[tuple[Launch, str]] = []


def unhandled_signals() -> None:
    """In a forked process: signals end it, as if this process had not handled them (`processes.ended_by_signals`)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def compile_of_work(number: int) -> Compiled:
    return compile_launch(*_work[number])


def distinct(launches: Iterator[Launch]) -> Iterator[Launch]:
    """One launch for each kernel and key."""
    seen: set[tuple[str, str]] = set()
    for launch in launches:
        key = (launch.kernel.title, key_of_launch(launch))
        if key not in seen:
            seen.add(key)
            yield launch


def key_of_launch(launch: Launch) -> str:
    parameters = parameters_of(function_under_jit(launch.kernel))
    names = {name for name, _ in parameters}
    options = {name: x for name, x in launch.scalars.items() if name not in names}
    return key_of(parameters, {**launch.scalars, **launch.pointers}, options)


def parameters_of(function: Any) -> list[tuple[str, str]]:
    """Names and kinds of a kernel's parameters."""

    def kind(parameter: Any) -> str:
        return CONSTANT if parameter.is_constexpr else PLAIN if parameter.do_not_specialize else SPECIALIZED

    return [(parameter.name, kind(parameter)) for parameter in function.params]


def compile_launch(launch: Launch, arch: str) -> Compiled:
    """Compile the kernel of a launch."""
    import triton  # pyright: ignore[reportMissingImports]

    source, target, options = source_of(launch, arch)
    kernel = triton.compile(source, target=target, options=options)  # pyright: ignore[reportAttributeAccessIssue]
    image = without_debug(kernel.asm["cubin"])
    facts = facts_of(kernel.metadata, source.signature, image)
    parameters = parameters_of(launch.kernel.function())
    return Compiled(launch.kernel.title, parameters, key_of_launch(launch), facts, image)


def source_of(launch: Launch, arch: str) -> tuple[Any, Any, dict[str, Any]]:
    """The source, target and options with which Triton compiles a kernel at a first call."""
    from triton import knobs  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource, make_backend  # pyright: ignore[reportMissingImports]
    from triton.experimental.gluon._runtime import GluonASTSource  # pyright: ignore[reportMissingImports]
    from triton.runtime.jit import create_function_from_signature  # pyright: ignore[reportMissingImports]

    from ..backend.gpu.triton_launch import OPTIONS, for_triton

    function = launch.kernel.function()
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    backend = make_backend(target)
    bind = create_function_from_signature(function.signature, function.params, backend)
    arguments = {**launch.scalars, **{name: for_triton(x) for name, x in launch.pointers.items()}}
    arguments |= {**OPTIONS, "debug": False, "instrumentation_mode": knobs.compilation.instrumentation_mode}
    bound, specialization, options = bind(**arguments)
    options, signature, constants, attributes = function._pack_args(backend, arguments, bound, specialization, options)
    source = (GluonASTSource if function.is_gluon() else ASTSource)(function, signature, constants, attributes)
    return source, target, options.__dict__


def facts_of(metadata: Any, signature: dict[str, str], image: bytes) -> dict[str, Any]:
    """The index entry of a binary: `backend.gpu.binary.Binary` reads it."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST  # pyright: ignore[reportMissingImports]

    types = [type_in_index(name) for name in signature.values()]
    layouts = metadata.tensordesc_meta or []
    if len(layouts) != types.count("map") or any(x is None or x["fp4_padded"] for x in layouts):
        raise BuildError(f"{metadata.name} takes a descriptor that is no tensor map")
    if max(metadata.global_scratch_align, metadata.profile_scratch_align) > SCRATCH_ALIGNMENT:
        raise BuildError(f"{metadata.name} needs scratch memory aligned to more than {SCRATCH_ALIGNMENT} bytes")
    return {
        "function": metadata.name,
        "cubin": hashlib.sha256(image).hexdigest(),
        "types": types,
        "maps": [
            (x["swizzle"], TMA_DTYPE_DEVICE_TO_HOST[x["elem_type"]], x["elem_size"], x["block_size"]) for x in layouts
        ],
        "warps": metadata.num_warps,
        "cluster": metadata.num_ctas,
        "shared": metadata.shared,
        "programmatic": metadata.launch_pdl,
        "cooperative": metadata.launch_cooperative_grid,
        "scratch": (metadata.global_scratch_size, metadata.profile_scratch_size),
    }


def type_in_index(name: str) -> str | None:
    """The type of an argument; `None` for one that is compiled away."""
    if name == "constexpr":
        return None
    return "pointer" if name.startswith("*") else "map" if name.startswith("tensordesc") else name


def write(path: Path, arch: str, triton: str, compiled: list[Compiled]) -> None:
    """Write an archive of what a version of Triton compiled; equal kernels give equal bytes."""
    kernels: dict[str, Any] = {}
    for x in sorted(compiled, key=lambda x: (x.title, x.key)):
        kernel = kernels.setdefault(x.title, {"parameters": x.parameters, "binaries": {}})
        kernel["binaries"][x.key] = x.facts
    index = {"triton": triton, "sources": sources(), "kernels": kernels}
    write_archive(path, arch, index, {x.facts["cubin"]: x.image for x in compiled})


def write_archive(path: Path, arch: str, index: dict[str, Any], images: dict[str, bytes]) -> None:
    """Write an archive of machine code by its hash."""
    memory = io.BytesIO()
    text = json.dumps({"format": FORMAT, "arch": arch, **index}, separators=(",", ":")).encode()
    with zipfile.ZipFile(memory, "w") as file:
        file.writestr(zipfile.ZipInfo(INDEX, SAME_DATE), text, zipfile.ZIP_DEFLATED, 9)
        for name, image in sorted(images.items()):
            # A third smaller than deflated (docs/journal/2026-11-26-archive.md).
            file.writestr(zipfile.ZipInfo(name, SAME_DATE), image, zipfile.ZIP_LZMA)
        file.comment = hashlib.sha256(text).hexdigest().encode()
    path.write_bytes(memory.getvalue())
