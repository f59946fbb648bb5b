"""The files of measured rates, `flashtile/rates/<chip>.toml`."""

import functools
import tomllib
from importlib import resources
from typing import Any

FOLDER = "rates"


@functools.cache
def rate_files(kind: str | None = None) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Names in the package and contents of the files of a kind of chip; of GPUs, which name none."""
    folder = resources.files("flashtile") / FOLDER
    found = sorted((x for x in folder.iterdir() if x.name.endswith(".toml")), key=lambda x: x.name)
    contents = ((f"{FOLDER}/{file.name}", tomllib.loads(file.read_text())) for file in found)
    return tuple((name, content) for name, content in contents if content["chip"].get("kind") == kind)
