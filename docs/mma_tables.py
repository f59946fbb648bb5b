"""The table of `benchmarks/results/mma-sync.jsonl` that docs/make_tables.py fills: sm_80's code on a newer GPU."""

import json
import math
import statistics
from collections import defaultdict

from cells import RESULTS, markdown

PEERS = {"sdpa:flash": "FlashAttention-2", "sdpa:efficient": "efficient"}


def compared() -> str:
    """Time of PyTorch's kernels relative to ours, by head dimension: geometric mean and least of the calls."""
    found: defaultdict[tuple[int, str], defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in (RESULTS / "mma-sync.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "cell" not in row:
            continue
        cell = row["cell"]
        times = {x["provider"]: statistics.median(x["samples"]) for x in row["rows"] if x["status"] == "ok"}
        for peer in PEERS.keys() & times.keys():
            kind = cell.get("head_dim", 64), cell.get("measure", "forward")
            found[kind][peer].append(times[peer] / times["flashtile"])
    body = []
    for (width, measure), ratios in sorted(found.items(), key=lambda x: (x[0][1] == "backward", x[0][0])):
        cells = [
            f"{math.exp(statistics.mean(map(math.log, ratios[peer]))):.2f} ({min(ratios[peer]):.2f})" for peer in PEERS
        ]
        body.append([measure, str(width), str(len(ratios["sdpa:flash"])), *cells])
    return markdown(("", "head dimension", "calls", *PEERS.values()), body)


TABLES = {"mma_sync": compared}
