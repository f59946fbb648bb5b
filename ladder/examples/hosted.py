"""Chapters in a hosted notebook, one click away: links to open them, and a cell that installs the course there.

The repository's address is one setting, `url` in pyproject.toml of the repository's root. Where it is empty, or that
file is not there, notebooks and pages have no links. `run_notebooks.py` writes the cells when it stores outputs.
"""

import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).parents[2]
FOLDER = "ladder/examples"  # in the repository
GITHUB = "https://github.com/"
LINKS, INSTALL = "hosted-links", "hosted-install"  # names of the cells
CODE = """# The course and what it needs, where it is not installed.
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("flashtile_ladder") is None:
    course = "flashtile-ladder @ git+{url}#subdirectory=ladder"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", course, "triton"], check=True)"""


def repository() -> str:
    """The repository's address, or nothing."""
    path = ROOT / "pyproject.toml"
    hooks = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["hatch"]["metadata"] if path.exists() else {}
    return hooks.get("hooks", {}).get("custom", {}).get("url", "").rstrip("/")


def links(url: str, notebook: str) -> str:
    """Markdown that opens a notebook: in Colab from a repository on GitHub, in Binder from any; nothing without one."""
    path, found = f"{FOLDER}/{notebook}", []
    if not url:
        return ""
    if url.startswith(GITHUB):
        name = url.removeprefix(GITHUB)
        found.append(f"[Colab](https://colab.research.google.com/github/{name}/blob/main/{path})")
        place = f"gh/{name}"
    else:
        place = f"git/{quote(url, safe='')}"
    found.append(f"[Binder](https://mybinder.org/v2/{place}/main?labpath={quote(path, safe='')})")
    return " · ".join(found)


def with_address(notebook: dict[str, Any], name: str, url: str) -> dict[str, Any]:
    """The notebook with links below its title and a cell that installs the course; without an address, with neither."""
    cells = [cell for cell in notebook["cells"] if cell["id"] not in (LINKS, INSTALL)]
    if url:
        text = {"cell_type": "markdown", "id": LINKS, "metadata": {}, "source": [f"Open it in {links(url, name)}."]}
        code = CODE.format(url=url).splitlines(keepends=True)
        install = {"cell_type": "code", "execution_count": None, "id": INSTALL, "metadata": {}, "outputs": []}
        cells[1:1] = [text, install | {"source": code}]
    return notebook | {"cells": cells}
