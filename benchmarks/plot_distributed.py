"""A picture of calls over ranks: `python benchmarks/plot_distributed.py results.csv picture.svg`.

Left: the efficiency that `benchmarks/distributed.py` measured, by numbers of GPUs. Right: the speedups that the model
of time predicts for more GPUs at the rates of the largest number, in nodes of eight, with NVLink inside of a node and
InfiniBand between nodes.
"""

import csv
from collections import defaultdict
from pathlib import Path

import click
import matplotlib.pyplot as plt

from flashtile.distributed import Rates, simulate

plt.rcParams["svg.fonttype"] = "none"  # text stays text
NODE = 8  # GPUs
INFINIBAND = 5e10  # bytes/s of a GPU, 400 Gbit/s
LENGTHS = 2**17, 2**20, 2**23
RANKS = 8, 16, 32, 64, 128, 256, 512, 1024
STYLES = "--", "-"  # of numbers of GPUs
FAR = 1.5  # of one GPU's samples, from which on its least time counts
SCHEMES = {1: ("ring", "gather", "ulysses"), 2: ("ring+ulysses", "gather+ulysses")}


def rates_of(row: dict[str, str]) -> tuple[Rates, float]:
    """The rates of a stored row with the link between nodes first, and the link inside of a node."""
    link, numbers = float(row["link_gbytes"]) * 1e9, {name: float(row[name]) for name in row if name.endswith("tflops")}
    forward, backward = (numbers[f"{name}_tflops"] * 1e12 for name in ("forward", "backward"))
    latency, copies = float(row["latency_us"]) * 1e-6, float(row["copies_gbytes"]) * 1e9
    return Rates(forward, (INFINIBAND, link), latency, backward, copies), link


def efficiency(row: dict[str, str]) -> float:
    """That of a call, by the least time of one GPU if another one is far from it."""
    one, least, most = (float(row[name]) for name in ("one_ms", "one_least_ms", "one_most_ms"))
    return (least if most > FAR * least else one) / float(row["ms"]) / int(row["ranks"])


def best_speedup(ranks: int, seqlen: int, rates: Rates, link: float) -> float:
    """That of the best scheme."""
    mesh = (ranks,) if ranks <= NODE else (ranks // NODE, NODE)
    rates = rates._replace(bytes_per_second=(link,)) if len(mesh) == 1 else rates
    return max(simulate(scheme, mesh, rates=rates, seqlen=seqlen).speedup for scheme in SCHEMES[len(mesh)])


@click.command()
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.argument("picture", type=click.Path(path_type=Path))
def main(results: Path, picture: Path) -> None:
    """Both panels."""
    stored = list(csv.DictReader(results.read_text().splitlines()))
    figure, (measured, predicted) = plt.subplots(1, 2, figsize=(9, 3.4))
    lines: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for row in stored:
        if row["call"] == "auto":
            lines[row["mask"], int(row["ranks"])].append((int(row["seqlen"]), efficiency(row)))
    colors = {mask: f"C{n}" for n, mask in enumerate(dict.fromkeys(mask for mask, _ in lines))}
    styles = dict(zip(sorted({ranks for _, ranks in lines}), STYLES, strict=True))
    for (mask, ranks), points in lines.items():
        look = {"marker": "o", "markersize": 3, "color": colors[mask], "linestyle": styles[ranks]}
        measured.plot(*zip(*sorted(points), strict=True), label=f"{mask}, {ranks}", **look)
    measured.set(xlabel="tokens", ylabel="efficiency", title=f"measured on {' and '.join(map(str, styles))} GPUs")
    measured.set_ylim(bottom=0)
    measured.set_xscale("log", base=2)
    rates, link = rates_of(max(stored, key=lambda row: int(row["ranks"])))
    for seqlen in LENGTHS:
        speedups = [best_speedup(ranks, seqlen, rates, link) for ranks in RANKS]
        predicted.plot(RANKS, speedups, marker="o", markersize=3, label=f"{seqlen // 1024}k tokens, causal")
    predicted.plot(RANKS, RANKS, color="gray", linewidth=0.8, linestyle="--")
    predicted.set(xlabel="GPUs", ylabel="speedup", title="predicted, best scheme")
    predicted.set_xscale("log", base=2)
    predicted.set_yscale("log", base=2)
    for axis in (measured, predicted):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, frameon=False, handlelength=3, ncols=1 + (axis is measured))
    figure.tight_layout()
    figure.savefig(picture)


if __name__ == "__main__":
    main()
