"""A picture of one result file of `flashtile bench`: `python benchmarks/plot.py results.csv picture.svg`."""

import csv
import math
from collections import defaultdict
from pathlib import Path

import click
import matplotlib.pyplot as plt

plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "flashtile"})  # text stays text


@click.command()
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.argument("picture", type=click.Path(path_type=Path))
@click.option("--head-dim", "head_dims", multiple=True, help="Of the panels; may be repeated. All, if it is not given.")
def main(results: Path, picture: Path, head_dims: tuple[str, ...]) -> None:
    """TFLOP/s of visible pairs, medians with 20% and 80% quantiles; a panel for each head dimension and mask."""
    panels: dict[tuple[str, str], dict[str, list[tuple[int, float, float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    with results.open() as file:
        for row in csv.DictReader(file):
            wanted = not head_dims or row["head_dim"] in head_dims
            if wanted and row["status"] == "ok" and row["flops_per_second"]:
                speed = [float(row[f"flops_per_second{suffix}"]) / 1e12 for suffix in ("", "_p20", "_p80")]
                panel = (row["head_dim"], "causal" if row["causal"] == "True" else "full")
                panels[panel][row["provider"]].append((int(row["seqlen_q"]), *speed))
    rows = math.ceil(len(panels) / 2)  # causal and full beside each other
    figure, axes = plt.subplots(rows, 2, figsize=(7, 2.6 * rows), sharey=True, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (panel, providers) in zip(axes.flat, panels.items(), strict=False):
        for provider, points in providers.items():
            seqlen, median, low, high = zip(*sorted(points), strict=True)
            thick = 2.5 if provider == "flashtile" else 1.2
            axis.plot(seqlen, median, marker="o", markersize=3, linewidth=thick, label=provider)
            axis.fill_between(seqlen, low, high, alpha=0.2)
        axis.set_xscale("log", base=2)
        axis.set_title(f"head_dim {panel[0]}, {panel[1]}", fontsize=10)
        axis.label_outer()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylim(bottom=0)  # of all panels, once they hold everything
    for row in axes:
        row[0].set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    most = max(axes.flat, key=lambda axis: len(axis.lines))  # not every provider is in every panel
    lines, names = most.get_legend_handles_labels()
    figure.legend(lines, names, loc="upper center", ncols=len(names), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.1 / rows))
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
