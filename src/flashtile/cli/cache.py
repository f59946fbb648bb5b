"""`flashtile cache`: the folder of compiled kernels on this machine: what is in it, and less of it."""

import argparse
import re
from collections import defaultdict
from typing import Any

from ..backend import user_files
from .options import CommandError, flag, json_option, option, print_json

UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def size(text: str) -> int:
    """Bytes, from a number and a unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text.strip())
    if found is None or found[2].lower() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 500MB; units: kB, MB, GB, KiB, MiB, GiB")
    return int(float(found[1]) * UNITS[found[2].lower()])


def arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    option(
        group, "--limit", type=size, metavar="SIZE", help="Remove what was not used for longest, down to 500MB, say."
    )
    flag(group, "--clear", help="Remove everything.")
    json_option(parser)


def run(*, limit: int | None, clear: bool, as_json: bool) -> None:
    """Show the folder of compiled kernels, limit it or empty it.

    It has the machine code of CPU kernels, and answers about GPU kernels. Whatever is removed is made again when it is
    needed. Without this command it stays below 1 GB: new files replace those that were not used for longest.
    FLASHTILE_CACHE_DIR names another folder. The code of GPU kernels is in Triton's own cache, which stays as it is
    (TRITON_CACHE_DIR).
    """
    limit = 0 if clear else limit
    try:
        removed = [] if limit is None else user_files.trim(limit)
        facts = survey(user_files.entries())
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from None
    freed = {"entries": len(removed), "bytes": sum(x.size for x in removed)}
    if as_json:
        print_json(facts | {"removed": freed})
        return
    print(f"{facts['path']}: {in_words(facts)}, of at most {megabytes(facts['limit'])}")
    for kind, part in facts["kinds"].items():
        print(f"  {kind:15}{in_words(part)}")
    if limit is not None:
        print(f"removed {in_words(freed)}")


def survey(entries: list[user_files.Entry]) -> dict[str, Any]:
    kinds: dict[str, dict[str, int]] = defaultdict(lambda: {"entries": 0, "bytes": 0})
    for x in entries:
        kinds[x.kind]["entries"] += 1
        kinds[x.kind]["bytes"] += x.size
    return {
        "path": str(user_files.directory()),
        "entries": len(entries),
        "bytes": sum(x.size for x in entries),
        "limit": user_files.LIMIT,
        "kinds": dict(sorted(kinds.items())),
    }


def in_words(part: dict[str, Any]) -> str:
    count = part["entries"]
    return f"{count} {'file' if count == 1 else 'files'}, {megabytes(part['bytes'])}"


def megabytes(count: int) -> str:
    return f"{count / 10**6:,.1f} MB"
