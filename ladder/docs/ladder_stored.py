"""The ladder's stored runs, for docs/ladder_tables.py: tables, rows, columns, and the machines of a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cells import paragraph

ROOT = Path(__file__).parents[1]
STORED = ROOT / "src" / "flashtile_ladder" / "cli" / "results"
COUNTERS = ROOT / "benchmarks" / "results"
# Steps by their names in the stored tables.
GRAPH, FLOATS, CPP_GRAPH, CPP = "2 scalar autograd", "2 Python floats", "3 C++ Value*, -O2", "3 C++ -O2"
STANDARD = "4 standard PyTorch"
THREE, KEPT, PRODUCT = "4 without lse", "4 with kept buffers", "11 flashtile.attention"
FLASH2, TRITON, LITE_ANY = "6 FlashAttention-2", "8 Triton, lse", "8 Triton, lite, any size"
QUIET = 0.25  # load for each core in the minute before a run, below which a machine is quiet
Row = dict[str, Any]


class MissingError(Exception):
    """The stored run lacks a table or a column; the message is the command that makes it."""


def stored(file: str, name: str) -> dict[str, Any]:
    tables = json.loads((STORED / f"{file}.json").read_text(encoding="utf-8"))["tables"]
    if name not in tables:
        raise MissingError(command(file, name))
    return tables[name]


def rows(file: str, name: str, *columns: str) -> list[Row]:
    """Rows of a stored table that has these columns."""
    found = stored(file, name)["rows"]
    if not found or not set(columns) <= set(found[0]):
        raise MissingError(command(file, name))
    return found


def command(file: str, name: str) -> str:
    device = " --device cuda" if file == "h200" else ""
    return f"flashtile-ladder{device} --table {name} --save src/flashtile_ladder/cli/results/{file}.json"


def or_missing(make: Callable[[], str]) -> Callable[[], str]:
    """The table, or the command that is to be run for it."""

    def made() -> str:
        try:
            return make()
        except MissingError as missing:
            return f"*Not measured yet:* `{missing}`"

    return made


def times(rows: list[Row], name: str, step: str) -> dict[int, float]:
    """A column of one step, by N."""
    return {row["n"]: row[name] for row in rows if row["step"] == step}


def code(step: str) -> str:
    return step.replace("flashtile.attention", "`flashtile.attention`").replace("Value*", "`Value*`")


# Machines -------------------------------------------------------------------------------------------------------------


def machine(file: str) -> str:
    """One sentence for each group of tables that were measured together, and whether the machine was quiet."""
    tables = json.loads((STORED / f"{file}.json").read_text(encoding="utf-8"))["tables"]
    groups: dict[str, list[str]] = {}
    for name, table in tables.items():
        groups.setdefault(described(table["machine"]), []).append(name)
    lines = [
        paragraph(f"{', '.join(f'`{name}`' for name in names)}: {words}", bullet="- ")
        for words, names in groups.items()
    ]
    noisy = {name: share for name, table in tables.items() if (share := disturbed_share(table["rows"])) > 0}
    if noisy:
        words = ", ".join(f"`{name}` {100 * share:.0f}%" for name, share in noisy.items())
        sentence = f"Times whose median is twice the fastest run or more: {words}. The others have none."
        lines.append(paragraph(sentence, bullet="- "))
    return "\n".join(lines)


def described(machine: Row) -> str:
    about = [machine.get("processor") or machine["device"]]
    if machine.get("processor") and machine["device"].startswith("NVIDIA"):
        about = [machine["device"], f"host {machine['processor']}"]
    about += [f"{name} {machine[key]}" for name, key in PACKAGES.items() if machine.get(key)]
    if machine.get("date"):
        about.append(machine["date"])
    words = ", ".join(about) + "."
    if machine.get("load") is not None:
        quiet = (
            ""
            if machine["load"] < QUIET * machine["cores"]
            else " *The machine was not quiet: these times are provisional.*"
        )
        words += f" One thread; load {machine['load']} on {machine['cores']} cores before the run.{quiet}"
    return words


PACKAGES = {"Python": "python", "PyTorch": "torch", "Triton": "triton", "Numba": "numba"}


def disturbed_share(rows: list[Row]) -> float:
    pairs = [
        row[name[: -len("ms")] + "median_ms"] / row[name]
        for row in rows
        for name in row
        if name.endswith("ms") and name[: -len("ms")] + "median_ms" in row
    ]
    return sum(ratio >= 2 for ratio in pairs) / len(pairs) if pairs else 0.0
