"""Triton's interpreter, without the repeated work that takes half of its time."""

import functools
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest


@pytest.fixture(scope="session", autouse=True)
def patched_once_per_launch() -> Iterator[None]:
    """The interpreter patches `triton.language` at each call of a device function; the first of a launch is enough."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton import language as tl
    from triton.runtime import interpreter

    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[tuple[ModuleType, ...]] = set()

    @functools.cache
    def modules_of(fn: Any) -> tuple[ModuleType, ...]:
        return tuple(x for x in fn.__globals__.values() if isinstance(x, ModuleType) and x in (tl, tl.core))

    def patch_once(fn: Any) -> Any:
        modules = modules_of(fn)
        if modules in patched:
            return interpreter._LangPatchScope()
        patched.add(modules)
        return patch_language(fn)

    def launch_unpatched(*args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(*args, **kwargs)

    with (
        mock.patch.object(interpreter, "_patch_lang", patch_once),
        mock.patch.object(interpreter.GridExecutor, "__call__", launch_unpatched),
    ):
        yield
