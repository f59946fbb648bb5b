"""A wheel with an archive of kernels in it."""

import base64
import csv
import hashlib
import io
import zipfile
from pathlib import Path

from ..backend.archive import file_name
from .build import SAME_DATE, BuildError

LARGEST = 60 * 10**6  # bytes of a wheel


def add(wheel: Path, archive: Path, arch: str) -> int:
    """Put an archive next to the package in a wheel, in place of one that is there; returns the wheel's size in bytes.

    Raises:
        BuildError: the wheel would be larger than `LARGEST`; it is left as it is.
    """
    name, memory = f"flashtile/{file_name(arch)}", io.BytesIO()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(memory, "w") as new:
        record = next(x for x in old.namelist() if x.endswith(".dist-info/RECORD"))
        for entry in old.infolist():
            if entry.filename not in (name, record):
                new.writestr(entry, old.read(entry), zipfile.ZIP_DEFLATED)
        content = archive.read_bytes()
        new.writestr(zipfile.ZipInfo(name, SAME_DATE), content, zipfile.ZIP_STORED)
        rows = [row for row in csv.reader(old.read(record).decode().splitlines()) if row[0] != name]
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            [*rows[:-1], (name, f"sha256={digest}", len(content)), rows[-1]]
        )
        new.writestr(zipfile.ZipInfo(record, SAME_DATE), text.getvalue(), zipfile.ZIP_DEFLATED)
    size = len(memory.getvalue())
    if size > LARGEST:
        raise BuildError(f"the wheel would have {size / 1e6:.1f} MB, more than {LARGEST / 1e6:.0f}")
    wheel.write_bytes(memory.getvalue())
    return size
