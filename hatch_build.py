"""The README as a package page needs it: no relative link or image."""

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


class ReadmeHook(MetadataHookInterface):
    """Sets `project.readme`."""

    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        page = package_page(text, self.config["url"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": page}
