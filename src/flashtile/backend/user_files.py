"""Files in the user's cache directory, which several processes may write at once.

Machine code is among them, so a file counts only if nobody else could have written it: it and its folders belong to
this user or to root, and neither their group nor others may write. On Windows the access lists of the user's profile
see to that. Without such a folder there is no cache, and one warning.
"""

import contextlib
import errno
import functools
import os
import stat
import tempfile
import warnings
from pathlib import Path

from ..errors import AttentionWarning

CACHE_VARIABLE = "FLASHTILE_CACHE_DIR"
BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
PRIVATE = 0o700


def directory() -> Path:
    """`$FLASHTILE_CACHE_DIR`, else `flashtile` in the user's cache directory.

    Raises:
        FileNotFoundError: the path is relative, or the user has no home. Warns once.
    """
    if configured := os.environ.get(CACHE_VARIABLE):
        path = Path(configured)
    elif (base := os.environ.get("XDG_CACHE_HOME")) and os.path.isabs(base):  # relative ones are invalid, it says
        path = Path(base) / "flashtile"
    else:
        path = Path(os.path.expanduser("~"), ".cache", "flashtile")
    if not path.is_absolute():
        refuse(path, "a path that is not absolute depends on the working directory")
    return path


def read(*names: str) -> bytes:
    """The content of a file below `directory()`.

    Raises:
        FileNotFoundError: there is none, or someone else could have written it; warns once of the latter.
        OSError: it cannot be read.
    """
    path = directory().joinpath(*names)
    for place in (directory(), path.parent):
        check_owner(place, os.stat(place))
    with open(path, "rb") as file:
        check_owner(path, os.fstat(file.fileno()))
        return file.read()


def write(content: bytes, *names: str) -> Path:
    """Write a temporary file and move it into place, so that concurrent readers see a complete file, old or new.
    Returns its path.

    Raises:
        OSError: the file cannot be written, or not where nobody else can write.
    """
    path = directory().joinpath(*names)
    directory().parent.mkdir(parents=True, exist_ok=True)
    for place in (directory(), path.parent):
        place.mkdir(mode=PRIVATE, exist_ok=True)
        check_owner(place, os.stat(place))
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def check_owner(path: Path, status: os.stat_result) -> None:
    """Refuse what someone else can write."""
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (os.geteuid(), 0):
        refuse(path, f"it belongs to user {status.st_uid}, and this process runs as {os.geteuid()}")
    if status.st_mode & BY_OTHERS:
        refuse(path, f"others may write it: `chmod go-w {path}`, if what is there is yours")


def refuse(path: Path, reason: str) -> None:
    warn_once(path, reason)
    raise FileNotFoundError(errno.ENOENT, reason, str(path))


@functools.cache
def warn_once(path: Path, reason: str) -> None:
    warnings.warn(
        f"{path} is not used as a cache: {reason}\n  Kernels are compiled in each process. "
        f"{CACHE_VARIABLE} names another folder, by an absolute path",
        AttentionWarning,
        stacklevel=2,
    )
