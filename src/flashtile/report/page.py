"""The page and its data files: report.html, report.json, and one CSV for each section."""

import json
from pathlib import Path
from typing import Any

from ..bench.results import write_csv
from .gather import Report
from .plots import standalone, svg_of
from .section import Section

TEMPLATE = Path(__file__).with_name("page.html")
HEADER = ("flashtile", "python", "torch", "torch threads")  # facts of `flashtile env` that the head shows
# Names of facts in report.json, and on the page.
FACTS = {
    "versions": "compared",
    "clocks before": "clocks and load at the end",
    "seconds": "seconds spent on",
    "cpu": "processor",
    "cpu cores": "cores",
    "cpu capability": "PyTorch's kernels",
    "gpus": "GPUs",
    "gpu driver": "GPU driver",
    "platform": "system",
    "variables": "environment variables",
}


def render(report: Report) -> tuple[str, dict[str, str]]:
    """The HTML, which refers to nothing outside, and every plot by its name."""
    from jinja2 import Environment

    svgs = {plot.name: svg_of(plot) for section in report.sections for plot in section.plots}
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    facts: dict[str, Any] = {name: x for name, x in report.about.items() if name in FACTS} | report.about["machine"]
    page = template.render(
        report=report,
        title=title_of(report),
        sections=report.sections,
        svgs=svgs,
        machine=flat({FACTS.get(name, name): x for name, x in facts.items() if name not in HEADER}),
        made=made(report),
        repeat=commands(report),
    )
    return page, svgs


def made(report: Report) -> list[str]:
    """Date, versions and threads, for the page's head."""
    about, machine = report.about, report.about["machine"]
    facts = [about["date"], f"flashtile {machine['flashtile']}{f', commit {x}' if (x := about['commit']) else ''}"]
    return [*facts, f"PyTorch {about['torch']}", machine["python"], f"{about['threads']} threads"]


def title_of(report: Report) -> str:
    """Display name of the device."""
    device, machine = report.about["device"], report.about["machine"]
    return f"{machine['cpu']}, {device}" if device.startswith("CPU") and machine.get("cpu") else device


def commands(report: Report) -> list[tuple[str, str]]:
    """The command of this page, and commands that repeat its parts at length."""
    device, sweep = ("", "cpu") if report.about["device"].startswith("CPU") else (" --device cuda", "features")
    return [
        (report.about["command"], "this page"),
        (f"flashtile verify{device} --cases 1000", "the gate, longer"),
        (f"flashtile verify{device} --cases 1000 --inputs captured", "the same with captured values"),
        (f"flashtile bench{device} --sweep benchmarks/{sweep}.toml", "speed, first calls and memory, from a checkout"),
        ("python examples/train_bytes.py --attention sdpa", "training with the other attention, from a checkout"),
        (f"flashtile explain{device} --help", "what one call would run"),
    ]


def flat(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Flatten nested facts into lines."""
    lines = []
    for name, x in values.items():
        if isinstance(x, dict):
            x = ", ".join(f"{key} {word(y)}" for key, y in x.items()) or "–"
        elif isinstance(x, list):
            x = "; ".join(", ".join(map(str, y.values())) if isinstance(y, dict) else str(y) for y in x) or "none"
        lines.append((name, word(x)))
    return lines


def word(x: Any) -> str:
    return "–" if x is None else f"{x:.3g}" if isinstance(x, float) else str(x)


def write(report: Report, folder: Path, images: bool = False) -> Path:
    """Write all files into `folder`, with `images` also each plot as an SVG; return the path of the page."""
    write_sections(report.sections, folder)
    (folder / "report.json").write_text(json.dumps(as_dict(report), indent=1, default=str) + "\n")
    page, svgs = render(report)
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    for name, svg in svgs.items() if images else ():
        (folder / f"{name}.svg").write_text(standalone(svg), encoding="utf-8")
    return path


def write_sections(sections: list[Section], folder: Path) -> None:
    """Write the figures of finished sections: one CSV each, and report.json. The report may be interrupted later."""
    folder.mkdir(parents=True, exist_ok=True)
    for section in sections:
        if section.records:
            write_csv(folder / f"{section.name}.csv", section.records)
    content = {"ok": None, "sections": {section.name: section_dict(section) for section in sections}}
    (folder / "report.json").write_text(json.dumps(content, indent=1, default=str) + "\n")


def as_dict(report: Report) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "seconds": report.seconds,
        "about": report.about,
        "sections": {section.name: section_dict(section) for section in report.sections},
    }


def section_dict(section: Section) -> dict[str, Any]:
    return {"ok": section.ok, "summary": section.summary, "notes": section.notes, "records": section.records}
