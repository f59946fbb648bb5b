"""Hooks of mkdocs.yml: the course's pages, a page of docstrings, and links that lead out of docs/.

A link to a page of the course leads to its place in the site. One to another file of the repository leads to the
address in pyproject.toml, or is words alone where that is empty, as on the package's page.
"""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACES = {"docs": "", "ladder/docs": "course"}  # folders of the repository, and of the site
REFERENCE = "# Reference\n\n::: flashtile\n    options:\n      group_by_category: false\n      members:\n"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"(<img src=\")(?!\w+:)([^\"]+)\"")


def repository() -> str:
    """The repository's address, or nothing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["url"].rstrip("/")


def reference() -> str:
    """The page that mkdocstrings makes: the names of docs/api.md in their order, functions first."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    return REFERENCE + "".join(f"        - {name}\n" for name in re.findall(r"^### (\w+)$", text, re.MULTILINE))


def site_path(path: str) -> str | None:
    """A file's place in the site, from its place in the repository."""
    folder = next((x for x in PLACES if path.startswith(f"{x}/") and not path.endswith(".py")), None)
    return None if folder is None else os.path.normpath(os.path.join(PLACES[folder], path[len(folder) + 1 :]))


def source_path(page: str) -> str:
    """The reverse of `site_path`."""
    return f"ladder/docs/{page.removeprefix('course/')}" if page.startswith("course/") else f"docs/{page}"


def words(text: str, path: str) -> str:
    """A link's text, which is the page's title where it was the name of its file."""
    first = (ROOT / path).read_text(encoding="utf-8").partition("\n")[0] if text == os.path.basename(path) else ""
    return first.removeprefix("# ") if first.startswith("# ") else text


def linked(text: str, page: str, url: str) -> str:
    """A page's text with links as the site has them."""
    folder = os.path.dirname(source_path(page))

    def moved(target: str) -> tuple[str, str | None]:
        path = os.path.normpath(os.path.join(folder, target))
        place = site_path(path)
        return path, None if place is None else os.path.relpath(place, os.path.dirname(page) or ".")

    def link(found: re.Match[str]) -> str:
        path, target = moved(found[3])
        if target is not None and (ROOT / path).is_file():
            return f"{found[1]}[{words(found[2], path)}]({target}{found[4] or ''})"
        return f"[{found[2]}]({url}/blob/main/{path}{found[4] or ''})" if url else found[2]

    # MkDocs leaves raw HTML as it is, and pages keep the folders of their sources.
    text = IMAGE.sub(lambda found: f'{found[1]}{moved(found[2])[1] or found[2]}"', text)
    return LINK.sub(link, text)


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports] - of the extra `docs`

    for path in sorted((ROOT / "ladder" / "docs").iterdir()):
        if path.suffix in (".html", ".md", ".svg"):
            files.append(File.generated(config, f"course/{path.name}", abs_src_path=str(path)))
    files.append(File.generated(config, "reference.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return linked(markdown, page.file.src_uri, repository())
