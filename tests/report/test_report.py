"""`flashtile report`: everything is measured and shown, the page is complete and readable, failures are visible."""

import csv
import html
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from commands import invoke

from flashtile.backend.tiled import forward
from flashtile.bench import captured
from flashtile.report import gate as gate_module
from flashtile.report import gather as gather_module
from flashtile.report import ladder, models, training
from flashtile.report.gate import gate
from flashtile.report.page import render, write_sections
from flashtile.report.plots import VARIABLES, standalone, svg_of
from flashtile.report.section import Plot, Section, Series, Table
from flashtile.report.settings import Settings, settings_for
from flashtile.report.verdict import RULE

SVG = "{http://www.w3.org/2000/svg}"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
SMALL = ["--seqlens", "48,96", "--memory-seqlens", "64,128", "--cases", "3", "--steps", "3", "--rounds", "2"]
TITLES = ("overview", "gate", "speed", "models", "memory", "errors", "planner", "training", "ladder")
PLOTS = 11
MODELS = """
providers = ["flashtile", "plain", "fa3"]
quick = ["tiny"]
[[cells]]
model = "tiny"
measure = ["forward", "backward"]
seqlen_q = 20
[[cells]]
model = "large"
seqlen_q = 100000
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small report, as the command makes it, of one call a sample: its sections, its folder and what was printed."""
    folder, reports = tmp_path_factory.mktemp("report"), []
    whole = gather_module.gather

    def kept(settings: Settings, *arguments: Any) -> Any:
        timing = replace(settings.timing, sample_seconds=1e-4, rest_seconds=0.0)
        short = replace(settings, timing=timing, error_seqlen=64, captured_cases=3, long_cases=1)
        reports.append(whole(short, *arguments))
        return reports[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_module, "gather", kept)
        patch.setattr(training, "BATCH", 2)
        (folder / "models.toml").write_text(MODELS)
        patch.setattr(models, "SWEEP", folder / "models.toml")
        patch.setattr(models, "STORED", {"cpu": folder / "none.jsonl"})
        patch.setattr(training, "SEQLEN", 32)
        if (found := ladder.course()) is not None:
            patch.setattr(found, "amount", lambda *_: found.Amount(found.QUICK, (8, 16), (64,), 1e-3))
        result = invoke(["report", "--quick", *SMALL, "--images", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return reports[0], folder, result.output


def test_every_section_is_there_with_rows_and_figures(made: Any) -> None:
    report, _, output = made
    assert tuple(section.name for section in report.sections) == TITLES
    for section in report.sections:
        assert section.title in output
        assert section.records
        assert section.tables
        for table in section.tables:
            assert table.rows
            assert {len(row) for row in table.rows} == {len(table.columns)}
            assert all(any(character.isalnum() for character in "".join(row)) for row in table.rows)


def test_the_folder_has_the_figures(made: Any) -> None:
    report, folder, _ = made
    found = json.loads((folder / "report.json").read_text())
    assert found["ok"]
    assert tuple(found["sections"]) == TITLES
    assert {"command", "commit", "machine", "versions"} <= found["about"].keys()
    for section in report.sections:
        with (folder / f"{section.name}.csv").open() as file:
            assert len(list(csv.DictReader(file))) == len(section.records)
    speeds = [r for r in found["sections"]["speed"]["records"] if r["status"] == "ok"]
    by_length = [r for r in speeds if r["inputs"] == "captured"]
    assert {(r["measure"], r["seqlen_q"]) for r in by_length} == {
        (m, n) for m in ("forward", "backward") for n in (48, 96)
    }
    assert {r["provider"] for r in speeds} == {"flashtile", "sdpa", "plain"}
    memory = {(r["measure"], r["provider"], r["seqlen"]) for r in found["sections"]["memory"]["records"]}
    assert len(memory) == 2 * 3 * 2


# Plots ---------------------------------------------------------------------------------------------------------------


def points_within_axes(svg: str, name: str) -> dict[str, int]:
    """For each set of data in a drawing, how many different points lie within the axes."""
    groups = {x.get("id", ""): x for x in ElementTree.fromstring(svg).iter(f"{SVG}g")}
    corners = coordinates(groups[f"{name}-axes-area"])
    (left, right), (top, bottom) = ((min(values), max(values)) for values in zip(*corners, strict=True))
    found = {}
    for key, group in groups.items():
        if key.startswith(f"{name}-data-"):
            inside = {(x, y) for x, y in coordinates(group) if left <= x <= right and top <= y <= bottom}
            found[key] = len(inside)
    return found


def coordinates(group: ElementTree.Element) -> list[tuple[float, float]]:
    """Coordinates of lines and marks, in the drawing's own units."""
    marks = [(float(x.get("x", "nan")), float(x.get("y", "nan"))) for x in group.iter(f"{SVG}use")]
    shapes = {id(path) for defs in group.iter(f"{SVG}defs") for path in defs.iter(f"{SVG}path")}
    paths = [path.get("d", "") for path in group.iter(f"{SVG}path") if id(path) not in shapes]
    numbers = [float(x) for path in paths for x in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", path)]
    return marks + list(zip(numbers[::2], numbers[1::2], strict=True))


def test_every_plot_has_its_points_within_its_axes(made: Any) -> None:
    report, folder, _ = made
    plots = [plot for section in report.sections for plot in section.plots]
    assert len(plots) == PLOTS
    for plot in plots:
        found = points_within_axes((folder / f"{plot.name}.svg").read_text(), plot.name)
        assert len(found) == len(plot.series)
        assert sum(found.values()) >= 2
        for series, count in zip(plot.series, found.values(), strict=True):
            assert count == len(set(zip(series.x, series.y, strict=True))) >= 1, plot.name


def test_an_empty_plot_and_a_point_outside_are_seen() -> None:
    empty = Plot("p", "empty", [Series("a", [], [])], "x")
    assert points_within_axes(svg_of(empty), "p") == {"p-data-0": 0}
    outside = Plot("p", "negative", [Series("a", [1.0, 2.0, 3.0], [1.0, -1.0, 2.0])], "x")
    assert points_within_axes(svg_of(outside), "p") == {"p-data-0": 2}  # the axis starts at 0


def test_plots_take_their_colors_from_the_page(made: Any) -> None:
    _, folder, _ = made
    page = (folder / "report.html").read_text()
    pictures = [path.read_text() for path in folder.glob("*.svg")]
    assert len(pictures) == PLOTS
    for text in (page, *pictures):
        assert not [color for color in VARIABLES if color in text]
        assert "prefers-color-scheme: dark" in text
        used = set(re.findall(r"var\((--[\w-]+)\)", text))
        assert used <= set(re.findall(r"(--[\w-]+):", text))
    for picture in pictures:
        ElementTree.fromstring(picture)


def test_names_are_no_formulas() -> None:
    name = r"a $\bad$ name & \$ more"
    shown = html.escape(name, quote=False)
    for plot in (
        Plot("lines", "t", [Series(name, [1, 2], [1, 2]), Series("b", [1, 2], [2, 3])], f"x {name}"),
        Plot("dots", "t", [Series(name, [1, 2], [0, 0])], "x", kind="dots", rows=(name,), mark=1.0),
    ):
        assert svg_of(plot).count(f"{shown}</text>") == (2 if plot.kind == "lines" else 1)


def test_a_plot_says_what_it_shows() -> None:
    plot = Plot("p", 'a "title" <b> & more', [Series("x&y", [1.0, 2.0], [3.0, 4.0])], "x")
    root = ElementTree.fromstring(standalone(svg_of(plot)))
    assert root.get("aria-label") == 'a "title" <b> & more. x&y: from 3 at 1 to 4 at 2'


# The page ------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags, names and references of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: list[str] = []
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.names.append(value or "")
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.references.append(value or "")


def test_the_page_needs_nothing_else(made: Any) -> None:
    _, folder, _ = made
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert all(reference.startswith("#") for reference in page.references)
    assert "@import" not in text
    assert not re.findall(r"url\((?!#)", text)
    assert page.tags.count("svg") == PLOTS


def test_names_on_the_page_are_unique_and_references_lead_somewhere(made: Any) -> None:
    _, folder, _ = made
    page = Page((folder / "report.html").read_text())
    assert len(page.names) == len(set(page.names))
    assert {reference[1:] for reference in page.references} <= set(page.names)


def test_words_are_escaped(made: Any) -> None:
    report, _, _ = made
    section = Section("gate", "<i>", "<b>bold</b>", [], [Table(("<th>",), [("<td>",)])], ["<li>"])
    text, _ = render(replace(report, sections=[section]))
    assert not [word for word in ("<i>", "<b>", "<th>", "<td><td>", "<li><li>") if word in text]


def test_a_failure_is_shown_and_is_the_exit_code(made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = forward.update

    def wrong(*arguments: Any) -> Any:
        state = right(*arguments)
        return state._replace(acc=state.acc * 0.9)

    report, _, _ = made
    settings = replace(settings_for(torch.device("cpu"), True), cases=2, captured_cases=1, long_cases=1)
    monkeypatch.setattr(forward, "update", wrong)
    failed = gate(settings, lambda: None)
    assert not failed.ok
    assert any(note.startswith("Wrong: tiled") for note in failed.notes)
    sections = [failed if x.name == "gate" else replace(x, plots=[]) for x in report.sections]
    monkeypatch.setattr(gather_module, "gather", lambda *_: replace(report, sections=sections))
    result = invoke(["report", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "FAILED" in result.output
    assert "A check failed" in (tmp_path / "report.html").read_text()


def test_a_section_that_fails_and_an_interruption_lose_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(error: type[BaseException]) -> Any:
        raise error("it is Sunday")

    made = Section("memory", "Is it small?", "It is.", records=[{"n": 1}])
    steps = [("memory", 1, lambda *_: made), ("two plans", 1, lambda *_: fails(RuntimeError))]
    monkeypatch.setattr(gather_module, "steps", lambda settings: [*steps, ("speed", 1, lambda *_: fails(SystemExit))])
    settings = settings_for(torch.device("cpu"), True)
    with pytest.raises(SystemExit):
        gather_module.gather(settings, {}, lambda sections: write_sections(sections, tmp_path))
    sections = json.loads((tmp_path / "report.json").read_text())["sections"]
    assert sections["memory"]["records"] == [{"n": 1}]
    assert not sections["two-plans"]["ok"]
    assert "RuntimeError: it is Sunday" in sections["two-plans"]["summary"]
    assert (tmp_path / "memory.csv").read_text().split() == ["n", "1"]


def test_a_slow_gate_examines_less_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "FEWEST", 3)
    monkeypatch.setattr(captured, "trained", [])
    captured.trained_model(1)  # of one step
    settings = replace(
        settings_for(torch.device("cpu"), True), cases=30, captured_cases=30, long_cases=1, gate_seconds=0.0
    )
    found = gate(settings, lambda: None)
    assert found.ok
    assert "4 of 32 random problems over every feature (then the time was up)" in found.summary
    assert "4 of 32 with captured values (then the time was up)" in found.summary


def test_without_the_course_the_report_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashtile_ladder.cli.report", raising=False)
    monkeypatch.setitem(sys.modules, "flashtile_ladder", None)
    section = ladder.ladder(settings_for(torch.device("cpu"), True), lambda: None)
    assert section.ok
    assert "pip install flashtile-ladder" in section.summary
    assert not section.tables


def test_a_course_that_cannot_be_imported_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its absence is none."""
    if ladder.course() is None:
        pytest.skip("needs flashtile-ladder")
    monkeypatch.delitem(sys.modules, "flashtile_ladder.cli.report")
    monkeypatch.setitem(sys.modules, "flashtile_ladder.cli.stack", None)
    with pytest.raises(ModuleNotFoundError, match="stack"):
        ladder.course()


def test_what_the_report_needs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    result = invoke(["report", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "pip install 'flashtile[report]'" in result.stderr


def test_limits_are_limits_and_reasons_are_said_once(made: Any) -> None:
    report, _, _ = made
    section = next(section for section in report.sections if section.name == "planner")
    assert all(r["seconds"] >= r["seconds_at_limit"] for r in section.records if r["limit"] == "compute")
    reasons = [note.rpartition(": ")[2] for note in section.notes]
    assert len(section.notes) == len(set(section.notes)) <= 2 * len(set(reasons))


def test_the_page_begins_with_the_answers_and_has_words_for_everything(made: Any) -> None:
    report, folder, _ = made
    text = (folder / "report.html").read_text()
    first = text[: text.index('<section id="gate"')]
    assert (first.count("<svg"), first.count("<table")) == (3, 1)
    assert RULE in first
    assert all(words in first for words in (report.about["date"], torch.__version__, "flashtile 0."))
    gate_section = text[text.index('<section id="gate"') : text.index('<section id="speed"')]
    assert gate_section.index("<details>") < gate_section.rindex("<table")
    headings = re.findall(r"<(?:th|dt)[^>]*>([^<]*)<", text)
    assert not [heading for heading in headings if "_" in heading]
    assert "ublished" not in text
    notes = re.findall(r"<li>([^<]*)</li>", text)
    assert len(notes) == len(set(notes))


# In a browser --------------------------------------------------------------------------------------------------------

# The page in a frame of each width; what is measured there is written into the document that the browser prints.
PROBE = """<!doctype html><meta charset="utf-8"><body>
<script>
const page = PAGE, found = [];
function measure(frame, width) {
  const view = frame.contentWindow, doc = frame.contentDocument;
  const wide = [...doc.querySelectorAll("main *")].filter(x => !x.closest(".scroll") && !x.closest("svg")
    && x.getBoundingClientRect().right > width + 0.5).map(x => x.tagName + " " + x.textContent.slice(0, 40));
  const plots = [...doc.querySelectorAll("figure svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map(x => [x.getBoundingClientRect(), x.textContent]);
    const outside = texts.filter(([b]) => b.left < box.left - 2 || b.right > box.right + 2 || b.top < box.top - 2
      || b.bottom > box.bottom + 2).map(([b, words]) => words);
    const data = [...svg.querySelectorAll("g")].filter(x => /-data-\\d+$/.test(x.id))
      .map(x => x.getBoundingClientRect()).map(b => b.width * b.height);
    const font = Math.min(...texts.map(([b]) => b.height));
    const name = svg.getAttribute("aria-label").slice(0, 40);
    return {name, width: box.width, height: box.height, outside, data, font};
  });
  const style = view.getComputedStyle(doc.body);
  return {width, page: doc.documentElement.scrollWidth, wide, plots, paper: style.backgroundColor, ink: style.color};
}
for (const width of [360, 1600]) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  frame.srcdoc = page;
  frame.onload = () => {
    found.push(measure(frame, width));
    if (found.length == 2) document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
  };
  document.body.append(frame);
}
</script></body>"""


def rendered(page: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """The page as a browser lays it out at each width."""
    assert BROWSER is not None
    path = folder / "probe.html"
    path.write_text(PROBE.replace("PAGE", json.dumps(page).replace("</", "<\\/")), encoding="utf-8")
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", *options]
    words += ["--window-size=1700,1000", "--virtual-time-budget=10000", "--dump-dom", path.as_uri()]
    done = subprocess.run([BROWSER, *words], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"FOUND(.*)END", done.stdout, flags=re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    return json.loads(re.sub("&lt;", "<", re.sub("&gt;", ">", re.sub("&amp;", "&", found[1]))))


def problems(views: list[dict[str, Any]]) -> list[str]:
    """Defects of the layout that a reader would see."""
    found = []
    for view in views:
        found += [f"{view['width']}: the page is {view['page']} wide"] if view["page"] > view["width"] else []
        found += [f"{view['width']}: {words} sticks out" for words in view["wide"]]
        for plot in view["plots"]:
            where = f"{view['width']}: {plot['name']}"
            found += [f"{where}: {words} is cut off" for words in plot["outside"]]
            found += [f"{where}: nothing is drawn"] if not plot["data"] or min(plot["data"]) < 20 else []
            found += [f"{where}: {plot['width']} x {plot['height']}"] if plot["width"] < 250 else []
            found += [f"{where}: letters of {plot['font']} px"] if plot["font"] < 9 else []
    return found


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium")


@needs_browser
def test_nothing_overflows_and_no_plot_is_empty(made: Any, tmp_path: Path) -> None:
    _, folder, _ = made
    views = rendered((folder / "report.html").read_text(), tmp_path)
    assert [(view["width"], len(view["plots"])) for view in sorted(views, key=lambda v: v["width"])] == [
        (360, PLOTS),
        (1600, PLOTS),
    ]
    assert not problems(views)


@needs_browser
def test_the_browser_sees_what_is_wrong(made: Any, tmp_path: Path) -> None:
    report, _, _ = made
    empty = Plot("empty", "nothing", [Series("a", [], [])], "x")
    long = Table(("a",), [("x",)])
    section = Section("gate", "Is it right?", "", [empty], [long])
    page, _ = render(replace(report, sections=[section]))
    page = page.replace("<h2>", '<div style="width: 2000px">too wide</div><h2>', 1)
    found = "\n".join(problems(rendered(page, tmp_path)))
    assert "too wide sticks out" in found
    assert "nothing: nothing is drawn" in found or "nothing is drawn" in found


@needs_browser
def test_dark_follows_the_reader(made: Any, tmp_path: Path) -> None:
    _, folder, _ = made
    page = (folder / "report.html").read_text()
    light = rendered(page, tmp_path, "--blink-settings=preferredColorScheme=1")[0]
    dark = rendered(page, tmp_path, "--blink-settings=preferredColorScheme=0")[0]
    brightness = [
        sum(map(int, re.findall(r"\d+", view[name])[:3])) for view in (light, dark) for name in ("paper", "ink")
    ]
    assert brightness[0] > 700 > 200 > brightness[1]
    assert brightness[2] < 200 < 600 < brightness[3]
