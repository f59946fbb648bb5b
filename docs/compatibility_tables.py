"""Tables of docs/compatibility.md: tests over versions, emulated ARM processors, kernels compiled for other GPUs."""

import json
from collections import Counter
from typing import Any

from cells import RESULTS, markdown, rows

KIB = 1024


def versions() -> str:
    """A row for each combination of `python -m matrix`, also for those that did not run."""
    stored = json.loads((RESULTS / "compatibility.json").read_text())
    columns = ("Python", "PyTorch", "Triton", "result", "skipped", "Hopper's kernels", "date")
    return markdown(columns, [version_row(row) for row in stored])


def version_row(row: dict[str, Any]) -> list[str]:
    installed = row.get("installed", row["versions"])
    if "reason" in row:
        return [*installed, f"not run: {row['reason']}", "", "", row["date"]]
    failures = ", ".join(f"`{name.rpartition('::')[2]}`" for name in row["failures"])
    result = f"{row['passed']} passed" + (f", {len(row['failures'])} failed: {failures}" if failures else "")
    return [*installed, result, str(row["skipped"]), row.get("hopper_kernels", ""), row["date"]]


def arm() -> str:
    columns = ("processor", "problems", "kernels", "launches", "wrong")
    return markdown(columns, [[row[name] for name in columns] for row in rows("arm.csv")])


def chips() -> str:
    """Kernels by architecture: their number, and the largest memory, registers and spills among them."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows("offline-triton-3.9.0.csv"):
        found.setdefault(row["arch"], []).append(row)
    body = []
    for arch, kernels in found.items():
        shared, registers, spilled = (max(int(x[name]) for x in kernels) for name in ("shared", "registers", "spilled"))
        spilling = sum(int(x["spilled"]) > 0 for x in kernels)
        names = len({x["name"] for x in kernels})
        size = f"{shared / KIB:.0f} KiB"
        columns = [arch, str(len(kernels)), str(names), size, str(registers), f"{spilling}, {spilled} bytes at most"]
        body.append([*columns, *loops_of(kernels)])
    header = ("architecture", "compiled", "different kernels", "shared memory", "registers", "spilling")
    header += ("multiply by", "spill where they multiply")
    return markdown(header, sorted(body, key=lambda row: (row[0][:3], len(row[0]), row[0])))


def loops_of(kernels: list[dict[str, str]]) -> list[str]:
    """The instruction by which most kernels multiply, and kernels that spill in the loop around it; of older rows
    neither is known.
    """
    products = Counter(name for x in kernels if (name := x.get("products")))
    if not products:
        return ["", ""]
    spilling = sum(int(x["spills"] or 0) > 0 for x in kernels)
    return [f"`{products.most_common(1)[0][0]}`", f"{spilling} of {products.total()}"]


TABLES = {"versions": versions, "arm": arm, "chips": chips}
