"""Compile LLVM IR to machine code in memory, with a cache of object files on disk.

An object file's name is a hash of everything that determines its content: the sources of the generators, the variant,
the processor with its features, and LLVM's version. A process that finds the file does not generate IR, the slowest
step of a first call. Files are written to a temporary name and moved into place, so concurrent processes do not see
partial files; a truncated or damaged file fails its checksum and is replaced. Processes that need a kernel at the same
time compile it once. If the directory cannot be written, every process compiles for itself, as where someone else could
have written it (`user_files`).
"""

import contextlib
import functools
import gc
import hashlib
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import llvmlite
import numpy as np
from llvmlite import binding as llvm

from ...locks import process_lock
from .. import user_files
from .targets import Target

CHECKSUM = hashlib.sha256().digest_size
_LOCK = process_lock()  # around all that uses LLVM
FOLDER = "cpu"  # of object files, in the user's cache
_LOADED: list[Any] = []  # engines, which own the machine code


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
SOURCES_HASH = hash_sources(PACKAGE)  # of the imported version


def function_address(name: str, variant: Any, target: Target, source: Callable[[], str]) -> int:
    """Load the kernel `name` of a variant, or compile the IR that `source` generates, and return its address."""
    with _LOCK:
        key_parts = (SOURCES_HASH, name, variant, target, llvm.llvm_version_info)
        key = hashlib.sha256(repr(key_parts).encode()).hexdigest()
        file = f"{key[:32]}.o"
        machine = target_machine(target)
        code = read_object(file)
        if code is None:
            with user_files.locked(FOLDER, file):
                code = read_object(file)  # which another process may have made meanwhile
                if code is None:
                    code = made_object(source, machine, file)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        _LOADED.append(engine)
        return engine.get_function_address(name)


def made_object(source: Callable[[], str], machine: Any, file: str) -> bytes:
    """Compile, and store the code in the cache."""
    with collector_paused():
        text = source()
    code = compile_object(text, machine)
    if hash_sources(PACKAGE) == SOURCES_HASH:  # not if they were edited since
        write_object(file, code)
    return code


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


def target_machine(target: Target) -> Any:
    initialize()
    llvm_target = llvm.Target.from_triple(target.triple)
    return llvm_target.create_target_machine(
        cpu=target.cpu, features=target.features, opt=2, jit=target.triple == llvm.get_process_triple()
    )


@functools.cache
def initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def compile_object(source: str, machine: Any) -> bytes:
    """Compile to an object file with three passes. The generators emit vectors and unrolled loops themselves, so LLVM's
    default pipeline would take ten times as long for code of the same speed.
    """
    module = llvm.parse_assembly(source)
    module.verify()
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()  # promotes variables to registers
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    return machine.emit_object(module)


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
