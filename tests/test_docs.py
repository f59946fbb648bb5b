"""What the documentation shows runs: examples in docstrings and pages. docs/api.md is what the docstrings make."""

import __future__

import doctest
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flashtile

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def make_api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names() -> dict[str, object]:
    """What examples of docstrings take as imported, and the tensors of the ladder's page."""
    return {"torch": torch, "flashtile": flashtile} | {x: torch.randn(6, 8) for x in ("q", "k", "v", "dout")}


def run(example: str, where: str, namespace: dict[str, object]) -> None:
    report: list[str] = []
    test = doctest.DocTestParser().get_doctest(example, namespace, where, None, None)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append, clear_globs=False)
    assert result.attempted > 0
    assert result.failed == 0, "".join(report)
    namespace |= test.globs


@pytest.mark.parametrize(
    "name", [name for name in flashtile.__all__ if ">>>" in (getattr(flashtile, name).__doc__ or "")]
)
def test_examples_of_docstrings(name: str) -> None:
    run(inspect.getdoc(getattr(flashtile, name)) or "", name, names())


def test_every_function_has_an_example() -> None:
    functions = [name for name in flashtile.__all__ if inspect.isfunction(getattr(flashtile, name))]
    assert len(functions) == 6
    assert not [name for name in functions if ">>>" not in (getattr(flashtile, name).__doc__ or "")]


@pytest.mark.parametrize("page", [x for x in PAGES if x.name != "api.md"], ids=lambda path: path.name)
def test_examples_of_pages(page: Path) -> None:
    """Blocks of a page share their names, as its reader would run them."""
    namespace = names()
    for kind, text in BLOCK.findall(page.read_text()):
        if kind == "pycon":
            run(text, page.name, namespace)
        else:  # annotations stay as they are written: docs/architecture.md declares what a backend has
            exec(compile(text, page.name, "exec", __future__.annotations.compiler_flag), namespace)


def test_the_api_page_is_what_the_docstrings_make() -> None:
    made = make_api().page()
    assert (ROOT / "docs" / "api.md").read_text() == made, "run `python docs/make_api.py`"


def test_the_api_page_has_every_public_name_and_argument() -> None:
    groups = make_api().GROUPS
    assert sorted(name for group in groups.values() for name in group) == sorted(flashtile.__all__)
    shared = set(inspect.signature(flashtile.attention).parameters)
    for name in (*groups["Functions"], "ScoreMod"):
        function = getattr(flashtile, name)
        described = set(re.findall(r"\w+", " ".join(re.findall(r"^    (\w[\w, ]*): ", inspect.getdoc(function), re.M))))
        others = shared if "The other arguments are those of `attention`" in function.__doc__ else set()
        missing = set(inspect.signature(function).parameters) - described - others
        assert not missing, f"{name} does not describe {missing}"
        assert "Raises:" in function.__doc__ or name == "backends"


def test_the_index_leads_to_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert not [page.name for page in PAGES if page.name != "index.md" and f"({page.name}" not in index]
    assert not [x.name for x in (ROOT / "examples").iterdir() if x.suffix in (".py", ".ipynb") and x.name not in index]


def test_dir_is_what_is_public() -> None:
    assert sorted(dir(flashtile)) == sorted([*flashtile.__all__, "__version__"])
