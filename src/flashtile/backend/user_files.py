"""Files in the user's cache directory, which several processes may write at once.

Each kind has a folder of its own below `directory()`: `cpu` has machine code of CPU kernels, `self-checks` answers
about GPU kernels (`dispatch.self_check`), and `triton` locks of GPU kernels, whose code is in Triton's cache. Together
they take at most `LIMIT` bytes: writes remove what has not been used for longest. A file's time of modification is when
it was last used, within `USE_IS_NOTED` seconds.

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
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl

    FILE_LOCKS = True
except ImportError:  # on Windows
    FILE_LOCKS = False

from ..errors import AttentionWarning

CACHE_VARIABLE = "FLASHTILE_CACHE_DIR"
BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
PRIVATE = 0o700
LIMIT = 10**9  # bytes
SHARE = 16  # a process writes this part of the bytes that are free before it lists the files again: others write, too
USE_IS_NOTED = 3600.0  # seconds
LOCK = ".lock"  # ends the names of locks
LONGEST_WAIT = 20.0  # seconds, for another process
PAUSE = 0.01
_held: set[Path] = set()  # locks that this process has
_room: dict[Path, int] = {}  # bytes that this process may write before it lists the files of a cache


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
        status = os.fstat(file.fileno())
        check_owner(path, status)
        if time.time() - status.st_mtime > USE_IS_NOTED:
            with contextlib.suppress(OSError):  # a folder may be read-only
                os.utime(path)
        return file.read()


def write(content: bytes, *names: str) -> Path:
    """Write a temporary file and move it into place, so that concurrent readers see a complete file, old or new.
    Returns its path.

    Raises:
        OSError: the file cannot be written, or not where nobody else can write.
    """
    path = private_place(*names)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    keep_limit(len(content))
    return path


def keep_limit(written: int) -> None:
    """Remove what has not been used for longest if the files may take more than `LIMIT` bytes. To list them takes 13 us
    a file, so not every write does it, and a full cache gets some room at once.
    """
    root = directory()
    room = _room.get(root, 0) - written
    if room < 0:
        total = sum(x.size for x in entries())
        if total > LIMIT:
            total -= sum(x.size for x in trim(LIMIT - LIMIT // SHARE))
        room = (LIMIT - total) // SHARE
    _room[root] = room


def private_place(*names: str) -> Path:
    """The path of a file to be written, in folders that are made for this user alone."""
    path = directory().joinpath(*names)
    directory().parent.mkdir(parents=True, exist_ok=True)
    for place in (directory(), path.parent):
        place.mkdir(mode=PRIVATE, exist_ok=True)
        check_owner(place, os.stat(place))
    return path


@contextlib.contextmanager
def locked(*names: str, patience: float | None = None) -> Iterator[None]:
    """Let no other process in that makes the same file, so that one makes it and the others find it. Where there are no
    locks, or another process has one for `patience` seconds (`LONGEST_WAIT`), each makes it for itself.
    """
    handle, path = None, None
    try:
        path = private_place(*names[:-1], names[-1] + LOCK)
        if FILE_LOCKS and path not in _held:  # a signal handler may need what it has interrupted
            handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
            wait_for(handle, LONGEST_WAIT if patience is None else patience)
            _held.add(path)
    except OSError:  # a folder that is only read, or a file system without locks
        path = None
    try:
        yield
    finally:
        if handle is not None:
            if path is not None:
                _held.discard(path)
                with contextlib.suppress(OSError):
                    os.unlink(path)
            os.close(handle)


def wait_for(handle: int, patience: float) -> None:
    """Lock an open file.

    Raises:
        OSError: it cannot be locked, or not in time.
    """
    latest = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > latest:
                raise
            time.sleep(PAUSE)


class Entry(NamedTuple):
    """A file of the cache."""

    path: Path
    kind: str  # its folder's name
    size: int  # bytes
    used: float  # seconds since 1970


def entries() -> list[Entry]:
    """All files but locks, least recently used first; none where there is no cache.

    Raises:
        OSError: the folder cannot be read, or someone else could have written it.
    """
    found, root = [], directory()
    if not root.exists():
        return []
    check_owner(root, os.stat(root))
    for folder in (x for x in os.scandir(root) if x.is_dir(follow_symlinks=False)):
        for file in (x for x in os.scandir(folder.path) if not x.name.endswith(LOCK)):
            with contextlib.suppress(FileNotFoundError):  # another process removes files, too
                status = file.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append(Entry(Path(file.path), folder.name, status.st_size, status.st_mtime))
    return sorted(found, key=lambda x: x.used)


def trim(limit: float) -> list[Entry]:
    """Remove the files that have not been used for longest, until the others have at most `limit` bytes together.
    Returns those that are gone. A process that has read a file does not need it any more.
    """
    removed, found = [], entries()
    total = sum(x.size for x in found)
    for x in found:
        if total <= limit:
            break
        with contextlib.suppress(FileNotFoundError):
            os.unlink(x.path)
        removed.append(x)
        total -= x.size
    return removed


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
        f"{path} is not used as a cache: {reason}\n  CPU kernels are compiled in each process. "
        f"{CACHE_VARIABLE} names another folder, by an absolute path",
        AttentionWarning,
        stacklevel=2,
    )
