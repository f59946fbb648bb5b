"""Tables of calls with masks and biases that docs/make_tables.py fills, from the file `STORED`."""

import json
import math
from typing import Any

from cells import RESULTS, figure, listed, markdown, paragraph

STORED = "h100-masks.jsonl"
PASSES = "forward", "backward"
OTHERS = "flex", "fa3", "efficient", "cudnn"  # with the same call
Times = dict[tuple[str, str], float]


def stored() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / STORED).read_text().splitlines()]


def mask_origin() -> str:
    """The origin of the stored calls, and those for which FlexAttention has no result."""
    values = stored()
    device, version = (listed(sorted({x[name] for x in values})) for name in ("device", "torch"))
    dates = listed(sorted({x["date"] for x in values}))
    words = [f"`{STORED}`: {len(values)} calls on an {device}, PyTorch {version}, bf16, of {dates}."]
    if without := [x["cell"] for x in values if "flex" in x["failures"]]:
        words.append(f"FlexAttention raises an error for {listed(without)}.")
    return paragraph(*words)


def calls() -> dict[str, tuple[Times, dict[str, Any]]]:
    """Milliseconds by provider and pass, and the settings, of each call."""
    found = {}
    for x in stored():
        packed = "document" in x["settings"]["mask"]  # as FlashAttention-3's call is
        names = {"fa3": "packed fa3"} if packed else {}
        times = {(names.get(row["provider"], row["provider"]), row["pass"]): row["ms"] for row in x["rows"]}
        found[x["cell"]] = times, x["settings"]
    return found


def slowest_first() -> list[tuple[str, Times, dict[str, Any]]]:
    """The calls, those first in which another library leads most."""
    found = [(name, *values) for name, values in calls().items()]
    return sorted(found, key=lambda x: min((lead(x[1], p) for p in PASSES), default=math.inf))


def lead(times: Times, which: str) -> float:
    """The time of the fastest other library in units of ours."""
    others = [times[name, which] for name in OTHERS if (name, which) in times]
    return min(others) / times["flashtile", which]


def in_words(times: Times, *names: str) -> str:
    """Forward and backward of the first of these providers that has both."""
    for name in names:
        both = [times.get((name, which)) for which in PASSES]
        if None not in both:
            return ", ".join(map(figure, both))
    return ""


def mask_calls() -> str:
    """All calls, losses first."""
    body = []
    for name, times, _ in slowest_first():
        sdpa = min(("efficient", "cudnn"), key=lambda x: times.get((x, "forward"), math.inf))
        columns = (("flashtile",), ("packed",), ("fa3", "packed fa3"), ("flex",), (sdpa,))
        cells = [in_words(times, *x) for x in columns]
        creation = figure(times.get(("flex", "block mask")))
        body.append([name, *cells, creation, ", ".join(f"{lead(times, which):.2f}" for which in PASSES)])
    header = (
        "call",
        "flashtile",
        "packed",
        "FlashAttention-3",
        "FlexAttention",
        "SDPA",
        "its block mask",
        "best other / flashtile",
    )
    return markdown(header, body)


def mask_means() -> str:
    """Geometric means of FlexAttention's time in units of ours, for masks and for biases and padding."""
    body = []
    for what, pairs in (("masks from functions", False), ("biases, padding", True)):
        cells = [what]
        for which in PASSES:
            ratios = [
                times["flex", which] / times["flashtile", which]
                for times, settings in calls().values()
                if ("flex", which) in times and bool(settings["pairs"]) == pairs
            ]
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            cells.append(f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} calls)")
        body.append(cells)
    return markdown(("FlexAttention's time / ours", *PASSES), body)


TABLES = {"mask_origin": mask_origin, "mask_calls": mask_calls, "mask_means": mask_means}
