"""Metadata that depends on the repository's address: the README without relative links, and `project.urls`."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface  # pyright: ignore[reportMissingImports]

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")
IMAGE = re.compile(r"!\[[^\]]*\]\((?!https?://)([^)]+)\)|<img src=\"(?!https?://)([^\"]+)\"([^>]*)>")
PARAGRAPH = re.compile(r"<p>\s*</p>\n*")


def package_page(text: str, url: str, version: str) -> str:
    """Make links and images absolute, at the tag of a version; without a `url`, keep the words of links and leave
    images out.
    """
    if not url:
        text = PARAGRAPH.sub("", IMAGE.sub("", text))
        return LINK.sub(r"\1", text) + "\nThe documentation and the images are in the source distribution.\n"
    base = url.rstrip("/")
    text = IMAGE.sub(
        lambda found: f'<img src="{base}/raw/v{version}/{found[1] or found[2]}"{found[3] or ""}>',
        text,
    )
    return LINK.sub(lambda found: f"[{found[1]}]({base}/blob/v{version}/{found[2]})", text)


def project_urls(url: str) -> dict[str, str]:
    """Links of a package page; none without a `url`."""
    base = url.rstrip("/")
    pages = {"Documentation": "blob/main/docs/index.md", "Changelog": "blob/main/CHANGELOG.md", "Issues": "issues"}
    return {"Repository": base} | {name: f"{base}/{page}" for name, page in pages.items()} if base else {}


class AddressHook(MetadataHookInterface):
    """Sets `project.readme` and `project.urls`."""

    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        page = package_page(text, self.config["url"], metadata["version"])
        metadata["urls"] = project_urls(self.config["url"])
        metadata["readme"] = {"content-type": "text/markdown", "text": page}
