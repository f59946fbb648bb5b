"""Archives of kernels that were compiled ahead: zip files.

`index.json` says which kernels there are; machine code is in files named after its SHA-256. The file's comment is the
SHA-256 of the index. An archive is for the sources that it was made from: their hash is in the index. One that does not
fit is ignored with one warning.
"""

import contextlib
import hashlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..errors import AttentionWarning

FORMAT = 1
INDEX = "index.json"
NO_ARCHIVE = "none"  # the value of a variable for it
PACKAGE = Path(__file__).parents[1]
ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what an archive that does not fit raises

Opened = TypeVar("Opened", bound="ArchiveFile")


class ArchiveFile:
    """An open archive for the first of some architectures, made for any of them from `sources`.

    Raises:
        OSError, ValueError, KeyError: the file cannot be read, is damaged, or is for something else.
    """

    def __init__(self, path: Path, archs: Sequence[str], sources: Any):
        import zipfile  # not needed by `import flashtile`

        with readable("it"):
            self.file = zipfile.ZipFile(path)
            text = self.file.read(INDEX)
        if hashlib.sha256(text).hexdigest().encode() != self.file.comment:
            raise ValueError("its index was altered")
        self.path, self.arch, self.index = path, archs[0], json.loads(text)
        if self.index["format"] != FORMAT:
            raise ValueError(f"its format is {self.index['format']}; this version reads {FORMAT}")
        if self.index["arch"] not in archs:
            raise ValueError(f"its kernels are for {self.index['arch']}, not for {self.arch}")
        if self.index["sources"] != sources:
            raise ValueError("its kernels were made from other sources than this version has")
        self.lock = threading.RLock()  # guards the file, which counts its readers

    def image(self, digest: str) -> bytes:
        """Machine code by its hash.

        Raises:
            ValueError: it is damaged, or this Python has no lzma.
        """
        with self.lock, readable("a kernel"):
            image = self.file.read(digest)
        if hashlib.sha256(image).hexdigest() != digest:
            raise ValueError("a kernel was altered")
        return image


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn all that `zipfile` and its decompressors raise about a damaged file into a ValueError; a missing module of
    theirs too.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{what} cannot be unpacked: {type(error).__name__}: {error}") from error


def hash_of(paths: Sequence[str]) -> str:
    """The hash of files of the package: of all Python files below a folder, or of one."""
    found = hashlib.sha256()
    for path in paths:
        top = PACKAGE / path
        for file in [top] if top.is_file() else sorted(top.rglob("*.py")):
            content = file.read_bytes()
            found.update(f"{file.relative_to(PACKAGE).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()


def file_name(arch: str) -> str:
    return f"kernels-{arch}.zip"


def open_archive(packaged: Path, variable: str, make: Callable[[Path], Opened]) -> Opened | None:
    """The archive that an environment variable names, else the package's, as `make` opens it; `None` without one that
    fits.
    """
    configured = os.environ.get(variable)
    path = Path(configured) if configured else packaged
    if configured == NO_ARCHIVE or not (configured or path.is_file()):
        return None
    try:
        return make(path)
    except ERRORS as error:
        warn(path, variable, error)
        return None


def warn(path: Path, variable: str, error: Exception) -> None:
    warnings.warn(
        f"the archive of kernels {path} is not used, so that they are compiled at first use: {error}\n"
        f"  `flashtile build-kernels` makes one; {variable}={NO_ARCHIVE} does without",
        AttentionWarning,
        stacklevel=2,
    )
