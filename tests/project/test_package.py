"""The metadata of the package, and its README as a package page shows it. `python tests/packaged.py` builds both."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from matrix.combinations import PYTHONS, TORCHES

import flashtile
from flashtile import supported
from flashtile.backend.cpu import support
from flashtile.backend.cpu.support import OLDEST_LLVMLITE

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
COURSE: dict[str, Any] = tomllib.loads((ROOT / "ladder" / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
RELATIVE = re.compile(r"\]\((?!https?://|#)[^)]*\)|src=\"(?!https?://)[^\"]*\"")


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """`hatch_build.py`, without hatchling."""
    plugin = ModuleType("interface")
    plugin.MetadataHookInterface = object  # type: ignore[attr-defined]
    names = ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin", "hatchling.metadata.plugin.interface")
    with mock.patch.dict(sys.modules, dict.fromkeys(names, plugin)):
        spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def test_links_of_the_package_page_lead_to_files_of_the_tag(hook: ModuleType) -> None:
    assert RELATIVE.search(README)
    page = hook.package_page(README, "https://example.org/flashtile/", "1.2")
    assert not RELATIVE.search(page)
    files = re.findall(r"https://example\.org/flashtile/(?:blob|raw)/v1\.2/([^)\"#]+)", page)
    assert len(files) == len(RELATIVE.findall(README)) > 30
    assert not [file for file in files if not (ROOT / file).exists()]
    assert page.count("<img ") == README.count("<img ")


def test_without_an_address_the_package_page_has_words_alone(hook: ModuleType) -> None:
    page = hook.package_page(README, "", "1.2")
    assert not RELATIVE.search(page)
    assert "<img" not in page
    assert "<p>" not in page
    kept, shown = (" ".join(x for x in text.splitlines() if not x.startswith("<")) for text in (README, page))
    words = re.sub(r"\[([^\]]*)\]\((?!#)[^)]*\)", r"\1", kept).split()
    assert shown.split()[: len(words)] == words


def test_links_of_the_project_follow_from_its_address(hook: ModuleType) -> None:
    assert hook.project_urls("") == {}
    urls = hook.project_urls("https://example.org/flashtile/")
    assert urls["Repository"] == "https://example.org/flashtile"
    pages = [url.partition("/blob/main/")[2] for url in urls.values() if "/blob/" in url]
    assert len(pages) == 2
    assert all((ROOT / page).exists() for page in pages)


def test_the_course_s_page_has_no_relative_links() -> None:
    assert not RELATIVE.search((ROOT / "ladder" / "README.md").read_text())


def test_contents_of_the_wheel() -> None:
    """Everything below the package and nothing else: no tests, no course, and few kinds of files, which stay small."""
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["src/flashtile"]}
    files = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(ROOT / "src").parts[0] for path in files} == {"flashtile"}
    assert {path.suffix for path in files} <= {".py", ".html", ".typed", ".toml"}
    assert not [path for path in files if path.name.startswith("test_") or "ladder" in path.parent.parts]
    assert sum(path.stat().st_size for path in files) < 3_580_000


def test_files_of_a_wheel_differ() -> None:
    """`check-wheel-contents` refuses a wheel with two equal files, but for empty ones."""
    for source in (ROOT / "src", ROOT / "ladder" / "src"):
        files = [
            x for x in sorted(source.rglob("*")) if x.is_file() and "__pycache__" not in x.parts and x.stat().st_size
        ]
        known: dict[bytes, Path] = {}
        for file in files:
            assert known.setdefault(file.read_bytes(), file) is file


def test_dependencies_of_a_plain_install() -> None:
    requirements = PROJECT["project"]["dependencies"]
    assert f"llvmlite>={'.'.join(map(str, OLDEST_LLVMLITE))}" in requirements
    names = {re.split(r"[<>=]", x)[0] for x in requirements}
    assert names == {"llvmlite", "numpy", "torch"}


def test_classifiers_and_requirements_agree() -> None:
    project = PROJECT["project"]
    versions = [x.rpartition(" ")[2] for x in project["classifiers"] if re.search(r":: 3\.\d+$", x)]
    assert tuple(versions) == PYTHONS
    assert project["requires-python"] == f">={PYTHONS[0]}"
    assert ".".join(map(str, supported.OLDEST)) == PYTHONS[0]
    (torch,) = (x.removeprefix("torch>=") for x in project["dependencies"] if x.startswith("torch>="))
    assert TORCHES[0].startswith(f"{torch}.")
    assert ".".join(map(str, supported.OLDEST_TORCH)) == torch
    assert project["version"] == flashtile.__version__ == COURSE["project"]["version"]
    assert f"\nversion: {flashtile.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert COURSE["project"]["requires-python"] == project["requires-python"]
    assert f"torch>={torch}" in COURSE["project"]["dependencies"]
    assert project["license"] == "BSD-3-Clause"
    assert not [x for x in project["classifiers"] if x.startswith("License")]  # the license is an expression


def test_an_older_llvmlite_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As numba 0.61 brings it, where flashtile was installed without its dependencies."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.44.0")
    assert support.unusable.__wrapped__() == "llvmlite 0.44.0 is installed, and it needs 0.45 or newer"


def test_issues_come_with_the_machine() -> None:
    templates = list((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))
    assert len(templates) == 3
    assert not [path.name for path in templates if "`flashtile env`" not in path.read_text()]
