"""Compilation by Triton: by one process at a time for each kernel, with a line on stderr where it takes long.

Triton keeps what it compiled on disk, but processes that need a kernel at once all compile it. Here the first one does,
and the others find its result in Triton's cache.
"""

import contextlib
import functools
import hashlib
from pathlib import Path
from typing import Any

from ...locks import process_lock
from .. import user_files
from ..compiling import compiling

FOLDER = "triton"  # folder of locks, in the user's cache
LONGEST = 300.0  # seconds that a compilation may take, before others stop waiting for it

_lock = process_lock()


def compiled_once(function: Any) -> Any:
    """The same function under `jit`. Triton's interpreter compiles nothing."""
    compile_one = getattr(function, "_do_compile", None)
    if compile_one is not None:
        function._do_compile = functools.partial(once, function, compile_one)
    return function


def once(function: Any, compile_one: Any, key: Any, *arguments: Any) -> Any:
    """Triton's `_do_compile`, while no other process compiles the same kernel. The function's class of sources is
    replaced meanwhile, so that threads compile one after another.
    """
    name = hashlib.sha256(f"{function.cache_key} {key}".encode()).hexdigest()[:32]
    in_turn = user_files.locked(FOLDER, name, patience=LONGEST)
    with in_turn, _lock, contextlib.ExitStack() as until_compiled:
        source_class = function.ASTSource

        def source(*given: Any) -> Any:
            """A source that tells when Triton makes code of it: only if that is not in the cache."""
            made = source_class(*given)
            make_ir = made.make_ir

            def make(*of_target: Any) -> Any:
                until_compiled.enter_context(compiling(cache_folder))
                return make_ir(*of_target)

            made.make_ir = make
            return made

        function.ASTSource = source
        try:
            return compile_one(key, *arguments)
        finally:
            function.ASTSource = source_class


def cache_folder() -> Path:
    """Triton's own."""
    from triton import knobs  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]

    return Path(knobs.cache.dir)
