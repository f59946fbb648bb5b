"""Documentation that cannot go stale: examples run, generated pages and tables are current, paths and links exist."""

import __future__

import doctest
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flashtile
import flashtile.nn

ROOT = Path(__file__).parents[2]
PACKAGE = Path(flashtile.__file__).parent
COURSE = ROOT / "ladder"
PAGES = sorted((ROOT / "docs").rglob("*.md")) + sorted(COURSE.rglob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]
JOURNAL = ROOT / "docs" / "journal"  # entries keep the names of their date
# Packages that a page is about.
OPTIONAL = {"transformers.md": "transformers", "diffusers.md": "diffusers", "onnx.md": "onnxscript"}
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def script(name: str) -> ModuleType:
    """One of docs/*.py, or of the course's."""
    folders = ROOT / "docs", COURSE / "docs"
    sys.path[:0] = [x for x in map(str, folders) if x not in sys.path]  # they import one another
    path = next(x for folder in folders if (x := folder / f"{name}.py").exists())
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names() -> dict[str, object]:
    """Names that examples in docstrings use, and the tensors of the ladder's page."""
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


def test_the_example_of_the_layer() -> None:
    run(inspect.getdoc(flashtile.nn.Attention) or "", "Attention", names())


def test_every_function_has_an_example() -> None:
    functions = [name for name in flashtile.__all__ if inspect.isfunction(getattr(flashtile, name))]
    assert len(functions) == 12
    assert not [name for name in functions if ">>>" not in (getattr(flashtile, name).__doc__ or "")]


@pytest.mark.parametrize("page", [x for x in PAGES if x.name != "api.md"], ids=lambda path: path.name)
def test_examples_of_pages(page: Path) -> None:
    """Blocks of a page share their names, as its reader would run them."""
    if page.name in OPTIONAL:
        pytest.importorskip(OPTIONAL[page.name], reason=f"needs {OPTIONAL[page.name]}")
    namespace = names()
    for kind, text in BLOCK.findall(page.read_text()):
        if kind == "pycon":
            run(text, page.name, namespace)
        else:  # annotations stay as they are written: docs/architecture.md declares what a backend has
            exec(compile(text, page.name, "exec", __future__.annotations.compiler_flag), namespace)


def test_the_api_page_is_what_the_docstrings_make() -> None:
    made = script("make_api").page()
    assert (ROOT / "docs" / "api.md").read_text() == made, "run `python docs/make_api.py`"


def test_the_api_page_has_every_public_name_and_argument() -> None:
    groups = script("make_api").GROUPS
    names = {name.split(".")[0] for group in groups.values() for name in group}
    assert names == {*flashtile.__all__, "distributed"}
    shared = set(inspect.signature(flashtile.attention).parameters)
    for name in (*groups["Functions"], "ScoreMod"):
        function = getattr(flashtile, name)
        described = set(re.findall(r"\w+", " ".join(re.findall(r"^    (\w[\w, ]*): ", inspect.getdoc(function), re.M))))
        others = shared if "The other arguments: as in `attention`" in function.__doc__ else set()
        missing = set(inspect.signature(function).parameters) - described - others
        assert not missing, f"{name} does not describe {missing}"
        assert "Raises:" in function.__doc__ or name in ("backends", "calls")


@pytest.mark.parametrize("page", script("make_tables").pages(), ids=lambda page: page.name)
def test_tables_are_what_the_results_make(page: Path) -> None:
    text = page.read_text()
    assert text == script("make_tables").filled(text), "run `python docs/make_tables.py`"


def test_measured_figures_of_the_ladder_are_made() -> None:
    """Outside of what `make_tables` fills in, the ladder's pages have no time and no rate but those of data sheets."""
    for page in ("ladder.md", "ladder_measurements.md"):
        text = re.sub(
            r"<!-- (?:table|figure): .*?<!-- end -->", "", (COURSE / "docs" / page).read_text(), flags=re.DOTALL
        )
        assert not re.findall(r".*\d (?:ms|µs|GB/s|GFLOP/s)\b.*", text), page


def test_tables_of_a_run_that_disagree_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call in two tables: a rate that only an older kernel has; growth with N and another dtype are no news."""
    script("ladder_stored")
    agreement = script("ladder_agreement")
    key = {"mask": "full", "pass": "forward", "dtype": "float32", "heads": 16, "step": "X"}
    tables = {"dtypes": [key | {"n": 2048, "ms": 1.0, "tflops": 8.0}, key | {"n": 8192, "ms": 9.0, "tflops": 10.0}]}
    monkeypatch.setattr(agreement, "rows", lambda file, name: tables.get(name, []))

    def seen(step: str, tflops: float) -> list[int]:
        tables["cuda"] = [{"n": 4096, "step": step, "ms": 4e-9 * 16 * 4096**2 * 64 / tflops}]
        return [rate.n for pair in agreement.disagreements("h200") for rate in pair if rate.table == "dtypes"]

    assert (seen("X", 9), seen("X", 50), seen("X", 2)) == ([], [8192], [2048])
    assert (seen("Y", 50), seen("X, float16", 50)) == ([], [])


def test_no_stored_run_of_the_ladder_beats_its_roofline() -> None:
    """float32 runs of `long` against the bound of the same stored run, each matrix moved once."""
    tables, compared = script("ladder_stored"), dict.fromkeys(("cpu", "h200"), 0)
    for file in compared:
        bounds = {row["n"]: row["bound_ms"] for row in tables.rows(file, "intensity") if "once" in row["algorithm"]}
        for row in tables.rows(file, "long"):
            if row["n"] in bounds and not re.search("float16|TF32", row["step"]):
                assert row["ms"] >= bounds[row["n"]], f"{file}: {row}"
                compared[file] += 1
    assert min(compared.values()) > 5, compared


def test_the_index_leads_to_every_page() -> None:
    """By links, also through the README files of docs/design and docs/journal."""
    index = ROOT / "docs" / "index.md"
    reached, ahead = {index}, [index]
    while ahead:
        page = ahead.pop()
        linked = {(page.parent / x).resolve() for x in re.findall(r"\]\(([^)#:]+\.md)", page.read_text())}
        ahead += linked - reached
        reached |= linked
    assert not set(PAGES) - reached
    text = (ROOT / "docs" / "examples.md").read_text()
    assert not [x.name for x in (ROOT / "examples").iterdir() if x.suffix in (".py", ".ipynb") and x.name not in text]


def anchors(page: Path) -> set[str]:
    """The names that headings have in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_headings(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text())
    targets = [(document if not file else document.parent / file, anchor) for file, anchor in links]
    assert not [(str(page), anchor) for page, anchor in targets if anchor not in anchors(page)]


@pytest.mark.parametrize(
    "document", [x for x in DOCUMENTS if x.parent != JOURNAL], ids=lambda path: str(path.relative_to(ROOT))
)
def test_paths_exist(document: Path) -> None:
    """Files and folders in backticks, from the root of the repository or of the package; `*` stands for any name. Names
    of Python files alone may be anywhere. Entries of the journal keep the names of their date.
    """
    quoted = re.findall(r"`([\w./*-]+)`", document.read_text())
    named = {x for x in quoted if "/" in x and (x.endswith("/") or "." in x.rpartition("/")[2])}
    files = {x for x in quoted if x.endswith(".py") and "/" not in x}
    folders = ("src", "tests", "benchmarks", "examples", "docs", "ladder")
    known = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    roots = ROOT, PACKAGE, COURSE, COURSE / "src" / "flashtile_ladder"
    missing = [x for x in named if not any(list(root.glob(x)) for root in roots)]
    assert not [*missing, *(files - known)]


def test_dir_is_what_is_public() -> None:
    assert sorted(dir(flashtile)) == sorted([*flashtile.__all__, "__version__"])


def test_the_site_has_every_page_and_nothing_else() -> None:
    """The navigation of mkdocs.yml, but for entries of the journal and the page that mkdocstrings makes."""
    shown = re.findall(r"^ +- (?:[\w\":, ]+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    places = [
        script("site_hooks").site_path(str(x.relative_to(ROOT))) for x in PAGES if not re.match(r"2\d{3}-", x.name)
    ]
    assert sorted(shown) == sorted(["reference.md", *filter(None, places)])


@pytest.mark.parametrize(
    ("page", "text", "url", "expected"),
    [
        ("index.md", "[a](faq.md#threads)", "", "[a](faq.md#threads)"),
        ("index.md", "[faq.md](faq.md#threads)", "", "[Questions](faq.md#threads)"),
        ("index.md", "[a](../ladder/docs/ladder.md#x)", "", "[a](course/ladder.md#x)"),
        ("design/cpu.md", "[a](../../ladder/docs/README.md)", "", "[a](../course/README.md)"),
        ("course/ladder.md", "[a](../../docs/faq.md) ![b](ladder.svg)", "", "[a](../faq.md) ![b](ladder.svg)"),
        ("index.md", "[a](../examples/varlen.py) [b](make_api.py)", "", "a b"),
        ("index.md", "[a](../SECURITY.md#x)", "https://x.org/f", "[a](https://x.org/f/blob/main/SECURITY.md#x)"),
        ("index.md", "[a](https://x.org) [b](#c)", "", "[a](https://x.org) [b](#c)"),
        ("faq.md", '<img src="images/speed.svg" alt="">', "", '<img src="images/speed.svg" alt="">'),
    ],
)
def test_links_of_the_site(page: str, text: str, url: str, expected: str) -> None:
    assert script("site_hooks").linked(text, page, url) == expected
