"""Self-check of kernels that a compiler of unknown version makes: a small problem against `tiled` before first use.

A miscompiled kernel can wait for ever or leave a GPU's context unusable, so the check runs in another process, with a
time limit. Its answer is kept on disk, by the sources of the kernels and the versions of Triton and PyTorch.
"""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterator
from importlib import resources
from typing import Any

import torch

from ..backend import user_files
from ..backend.gpu.installed import triton_release
from ..errors import AttentionWarning
from ..processes import importing_alike, run_python

TIMEOUT = 300.0  # seconds, compilation included
CODE = "import sys; from flashtile.dispatch import compare_with_tiled as c; c.main(*sys.argv[1:])"
FOLDER = "self-checks"  # folder of answers, in the user's cache
SOURCES = ("gpu", "hopper")  # folders below `backend` whose content decides what is compiled

_answers: dict[str, str | None] = {}  # by key, of this process


def failure(backend: str, kernels: Any, arch: str) -> str | None:
    """Why `kernels`, a NamedTuple that names them, are not used; `None` if their results are right. Warns about a
    failure once in a process.
    """
    facts = {
        "backend": backend,
        "kernels": kernels._asdict(),
        "arch": arch,
        "triton": triton_release(),
        "torch": torch.__version__,
        "sources": digest(),
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    if key in _answers:
        return _answers[key]
    known, reason = recorded(key)
    if not known:
        final, reason = answer(backend, kernels)
        if final:
            record(key, facts | {"failure": reason})
    if reason is not None:
        reason = f"self-check of its kernels ({kernels}) with Triton {facts['triton']}: {reason}"
        warnings.warn(
            f"the `{backend}` backend is left out: {reason}\n  Please report this, with the output of `flashtile env`. "
            "The call runs in another backend, or fails if it names this one.",
            AttentionWarning,
            stacklevel=2,
        )
    _answers[key] = reason
    return reason


def answer(backend: str, kernels: Any) -> tuple[bool, str | None]:
    """Run the check. Returns whether its outcome is worth keeping, and the failure or `None`."""
    try:
        ended = run_python(CODE, backend, json.dumps(kernels), env=importing_alike(), timeout=TIMEOUT)
    except Exception as error:  # no other process can be started here, or it takes too long
        return False, f"it did not end ({type(error).__name__}: {error})"
    try:
        outcome = json.loads(ended.stdout.splitlines()[-1])
        return bool(outcome["final"]), outcome["failure"]
    except (IndexError, ValueError, KeyError, TypeError):
        last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        return False, f"its process ended with {ended.returncode}: {last}"


def recorded(key: str) -> tuple[bool, str | None]:
    """Whether an earlier process has checked this, and its failure or `None`."""
    try:
        stored = json.loads(user_files.read(FOLDER, f"{key}.json"))
        failed = stored["failure"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False, None
    return failed is None or isinstance(failed, str), failed


def record(key: str, content: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        user_files.write((json.dumps(content, indent=1) + "\n").encode(), FOLDER, f"{key}.json")


def digest() -> str:
    """Hash of the sources of the kernels and of the code that launches them."""
    found = hashlib.sha256()
    for folder in SOURCES:
        for name, content in sources(resources.files("flashtile.backend") / folder):
            found.update(name.encode() + b"\0" + content)
    return found.hexdigest()


def sources(folder: Any, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """Names and contents of a folder's Python files and of those below it, in a fixed order."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from sources(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".py"):
            yield prefix + entry.name, entry.read_bytes()
