"""Files in the user's cache directory, which several processes may write at once."""

import contextlib
import os
import tempfile
from pathlib import Path

CACHE_VARIABLE = "FLASHTILE_CACHE_DIR"


def directory() -> Path:
    """`$FLASHTILE_CACHE_DIR`, else `flashtile` in the user's cache directory."""
    configured = os.environ.get(CACHE_VARIABLE)
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "flashtile"


def write(path: Path, content: bytes) -> None:
    """Write a temporary file and move it into place, so that concurrent readers see a complete file, old or new.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
