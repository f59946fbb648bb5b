"""Compile LLVM IR to machine code in memory, with a cache of object files on disk.

An object file's name is a hash of everything that determines its content: the sources of the generators, the variant,
the processor with its features, and LLVM's version. A process that finds the file does not generate IR, the slowest
step of a first call. Files are written to a temporary name and moved into place, so concurrent processes do not see
partial files; a truncated or damaged file fails its checksum and is replaced. Processes that need a kernel at the same
time compile it once. Microkernels and other parts that kernels share are object files of their own; a kernel's file has
those that it needs. Where cores are free, threads compile parts, and the kernel of a training step's other pass. If the
directory cannot be written, every process compiles for itself, as where someone else could have written it
(`user_files`).
"""

import contextlib
import functools
import gc
import hashlib
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import llvmlite
import numpy as np
from llvmlite import binding as llvm

from ...locks import process_lock
from .. import user_files
from ..compiling import compiling, within
from . import targets
from .side_by_side import Threads, emit_object, free_threads
from .targets import Processor, Target

if TYPE_CHECKING:
    from .kernels.codegen import Source

CHECKSUM = hashlib.sha256().digest_size
_LOCK = process_lock()  # around all that uses LLVM
FOLDER = "cpu"  # object files, in the user's cache
_LOADED: list[Any] = []  # engines, which own the machine code


class KernelSource(NamedTuple):
    """A kernel by all that its code depends on, and its IR."""

    name: str
    variant: Any
    target: Target
    source: "Callable[[], Source]"


_PARTS: dict[tuple[str, Target], Future[list[bytes]]] = {}  # which one thread makes, and others wait for
_AHEAD: dict[tuple[str, Any, Target], list[bytes]] = {}  # object files of kernels that no call has needed yet
_active: list[Threads] = []  # of compilations; a signal handler may compile inside of another one


def hash_sources(package: Any) -> str:
    """Hash a package's sources and the versions of the libraries that its generators use."""
    digest = hashlib.sha256(repr((llvmlite.__version__, np.__version__)).encode())
    for file in source_files(package):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def source_files(folder: Any) -> Iterator[Any]:
    """The Python files of a package and of those below it, in a fixed order."""
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.is_dir():
            yield from source_files(file)
        elif file.name.endswith(".py"):
            yield file


PACKAGE = resources.files("flashtile.backend.cpu")
SOURCES_HASH = hash_sources(PACKAGE)  # the imported version's


def function_address(
    name: str,
    variant: Any,
    target: Target,
    source: "Callable[[], Source]",
    others: Callable[[], Iterable[KernelSource]] = tuple,
) -> int:
    """Load the kernel `name` of a variant, or compile the IR that `source` generates, and return its address. Where it
    has to be compiled and cores are free, so are `others`, at the same time.
    """
    kernel = KernelSource(name, variant, target, source)
    with _LOCK:
        initialize()
        codes = _AHEAD.pop(kernel[:3], None)
        if codes is None:
            with Threads(0 if _active else free_threads()) as threads:
                _active.append(threads)
                try:
                    codes = kernel_objects(kernel, threads, others if threads.pool else tuple)
                finally:
                    _active.pop()
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine_for(target))
        for code in codes:
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        _LOADED.append(engine)
        return engine.get_function_address(name)


def kernel_objects(
    kernel: KernelSource, threads: Threads, others: Callable[[], Iterable[KernelSource]] = tuple
) -> list[bytes]:
    """The object files of a kernel and of its parts, from one file of the cache; they are made where there is none."""
    name, variant, target, source = kernel

    def make() -> bytes:
        begun = {other[:3]: threads.begin(kernel_objects, other, threads) for other in others()}
        code = made(source, target, threads)
        _AHEAD.update({key: ready() for key, ready in begun.items()})
        return code

    return split(found_or_made((name, variant), target, make))


def made(source: "Callable[[], Source]", target: Target, threads: Threads) -> bytes:
    """The object files of a module and of its parts."""
    with collector_paused():
        module = source()
    begun = [threads.begin(part_objects, name, target, of_part, threads) for name, of_part in module.parts.items()]
    code = compile_object(module.text, machine_for(target))
    parts = dict.fromkeys(itertools.chain.from_iterable(ready() for ready in begun))  # each once
    return joined([code, *parts])


def part_objects(name: str, target: Target, source: "Callable[[], Source]", threads: Threads) -> list[bytes]:
    """The object files of a part, which other kernels of this process and of others have, too."""
    mine: Future[list[bytes]] = Future()
    part = _PARTS.setdefault((name, target), mine)
    if part is not mine and (part.done() or threads.pool is not None):
        return part.result()
    try:  # a signal handler waits for nobody: others may wait for what it has interrupted
        with within():
            codes = split(found_or_made(name, target, lambda: made(source, target, threads)))
    except BaseException as error:
        _PARTS.pop((name, target), None)
        mine.set_exception(error)
        raise
    mine.set_result(codes)
    return codes


def found_or_made(key: Any, target: Target, make: Callable[[], bytes]) -> bytes:
    """A file of the cache, or its content made anew, by one process at a time."""
    key_parts = (SOURCES_HASH, key, target, targets.processor(target.width), llvm.llvm_version_info)
    file = f"{hashlib.sha256(repr(key_parts).encode()).hexdigest()[:32]}.o"
    content = read_object(file)
    if content is None:
        with user_files.locked(FOLDER, file):
            content = read_object(file)  # which another process may have made meanwhile
            if content is None:
                with compiling(lambda: user_files.directory() / FOLDER):
                    content = make()
                if hash_sources(PACKAGE) == SOURCES_HASH:  # not if they were edited since
                    write_object(file, content)
    return content


def joined(codes: list[bytes]) -> bytes:
    return struct.pack(f"<{1 + len(codes)}Q", len(codes), *map(len, codes)) + b"".join(codes)


def split(content: bytes) -> list[bytes]:
    """The parts of what `joined` has made."""
    (count,) = struct.unpack_from("<Q", content)
    ends = [*itertools.accumulate(struct.unpack_from(f"<{count}Q", content, 8), initial=8 * (1 + count))]
    return [content[start:end] for start, end in itertools.pairwise(ends)]


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Generators make some 100,000 objects and drop them together: to look for cycles among them, and among all that
    PyTorch has imported, takes longer than to make them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def machine_for(target: Target) -> Any:
    """The compiler of a target's code, for one thread."""
    return target_machine(targets.processor(target.width))


def target_machine(processor: Processor) -> Any:
    """LLVM's compiler of code that this process runs."""
    initialize()
    triple, cpu, features = processor
    jit = triple == llvm.get_process_triple()
    return llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=2, jit=jit)


@functools.cache
def initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def compile_object(source: str, machine: Any) -> bytes:
    """Compile to an object file with three passes. The generators emit vectors and unrolled loops themselves, so LLVM's
    default pipeline would take ten times as long for code of the same speed.
    """
    module = llvm.parse_assembly(source, llvm.create_context())
    module.triple = machine.triple
    module.verify()
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()  # promotes variables to registers
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    return emit_object(machine, module)


def read_object(file: str) -> bytes | None:
    """An object file's content; `None` if it is missing or damaged, or someone else could have written it."""
    try:
        stored = user_files.read(FOLDER, file)
    except OSError:
        return None
    checksum, code = stored[:CHECKSUM], stored[CHECKSUM:]
    return code if code and hashlib.sha256(code).digest() == checksum else None


def write_object(file: str, code: bytes) -> None:
    with contextlib.suppress(OSError):
        user_files.write(hashlib.sha256(code).digest() + code, FOLDER, file)
