"""Tables of sm_80's code on a newer GPU that docs/make_tables.py fills."""

import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator

from cells import RESULTS, markdown

from flashtile.bench.cell import Cell

PEERS = {"sdpa:flash": "FlashAttention-2", "sdpa:efficient": "efficient"}


def measured() -> Iterator[tuple[Cell, dict[str, float]]]:
    """The calls of the sweep, with the median seconds of each provider that ran."""
    for line in (RESULTS / "mma-sync.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "cell" in row:
            times = {x["provider"]: statistics.median(x["samples"]) for x in row["rows"] if x["status"] == "ok"}
            yield Cell.from_dict(row["cell"]), times


def ratios() -> dict[tuple[int, str], defaultdict[str, list[float]]]:
    """Time of PyTorch's kernels relative to ours for each call, by head dimension and pass, then by kernel."""
    found: defaultdict[tuple[int, str], defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell, times in measured():
        if cell.is_special or cell.measure == "decode":
            continue
        for peer in PEERS.keys() & times.keys():
            found[cell.head_dim, cell.measure][peer].append(times[peer] / times["flashtile"])
    return found


def compared() -> str:
    """Geometric mean and least of these, by head dimension."""
    body = []
    for (width, measure), peers in sorted(ratios().items(), key=lambda x: (x[0][1] == "backward", x[0][0])):
        cells = [f"{statistics.geometric_mean(peers[x]):.2f} ({min(peers[x]):.2f})" for x in PEERS]
        body.append([measure, str(width), str(len(peers["sdpa:flash"])), *cells])
    return markdown(("", "head dimension", "calls", *PEERS.values()), body)


def kind_of(cell: Cell) -> str:
    kinds = {"window of 512": cell.window, "mask function": cell.mask, "score function": cell.score_mod}
    return next((name for name, given in {**kinds, "bias": cell.bias}.items() if given), "")


def special() -> str:
    """The same of calls with a feature, with FlexAttention compiled for sm_80 too."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for cell, times in measured():
        if kind_of(cell) and {"flashtile", "flex", "sdpa:efficient"} <= times.keys():
            cells = (f"{times[peer] / times['flashtile']:.2f}" for peer in ("flex", "sdpa:efficient"))
            found[f"{kind_of(cell)}, {cell.measure}"] += [str(cell.head_dim), *cells]
    columns = ("head dimension", "FlexAttention", "efficient")
    return markdown(("", *columns, *columns), [[name, *cells] for name, cells in found.items()])


def packed() -> str:
    """Time of PyTorch's `varlen_attn` relative to ours."""
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for cell, times in measured():
        if cell.lengths and {"flashtile", "torch_varlen"} <= times.keys():
            name = f"{len(cell.lengths)} sequences, {sum(cell.lengths)} tokens, head dimension {cell.head_dim}"
            found[name][cell.measure] = f"{times['torch_varlen'] / times['flashtile']:.2f}"
    return markdown(("", "forward", "backward"), [[name, x["forward"], x["backward"]] for name, x in found.items()])


def read_rates() -> str:
    """Time of a plain read relative to decoding's, by page size."""
    with (RESULTS / "read-rate-sm80.csv").open() as file:
        rows = list(csv.DictReader(file))
    sizes = dict.fromkeys(row["page_size"] for row in rows)
    found: defaultdict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for row in rows:
        found[row["batch"], row["seqlen_k"], row["head_dim"]][row["page_size"]] = f"{float(row['share']):.2f}"
    names = [f"pages of {x}" if x else "one piece" for x in sizes]
    body = [[*shape, *(shares[x] for x in sizes)] for shape, shares in found.items()]
    return markdown(("batch", "keys", "head dimension", *names), body)


TABLES = {"mma_sync": compared, "mma_sync_special": special, "mma_sync_packed": packed, "mma_sync_decode": read_rates}
