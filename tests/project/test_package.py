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

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
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


def test_dependencies_of_a_plain_install() -> None:
    names = {re.split(r"[<>=]", x)[0] for x in PROJECT["project"]["dependencies"]}
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
    assert project["version"] == flashtile.__version__
    assert project["license"] == "BSD-3-Clause"
    assert not [x for x in project["classifiers"] if x.startswith("License")]  # the license is an expression
