"""Draw docs/images/llama.svg, the picture of README.md, and one for phones: `python docs/make_llama.py`.

Left: tokens/s of a Llama of 1B parameters relative to `sdpa`, which transformers picks, from `benchmarks/llama.py`.
Right, on phones below: features that no other fused attention has, or that each other one has in part.
"""

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from gpu_tables import llama_rows

IMAGES = Path(__file__).parent / "images"
COLORS = {"sdpa": "#b9c4d0", "fa3": "#7f9fc6", "tile_attention": "#1f4e8c"}
NAMES = {"sdpa": "sdpa", "fa3": "FlashAttention-3", "tile_attention": "flashtile"}
FEATURES = (
    "gradients of biases, sinks, ALiBi slopes and the log-sum-exp",
    "score and mask functions inside of the kernels",
    "dropout: one mask for a seed, on every device",
    "forward mode and second derivatives in kernels",
    "bits that do not depend on the batch, or on the run",
    "caches and pages of 8 bits, latent caches",
    "CPUs too: training and decoding",
    "no build: pip, and Python to read",
)


def draw(picture: Path, *, narrow: bool = False) -> None:
    matplotlib.use("svg")
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "flashtile", "font.size": 9}
    if narrow:
        figure, (left, right) = plt.subplots(2, 1, figsize=(4.9, 6), height_ratios=(4, 3))
    else:
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(5, 4))
    rows = llama_rows()
    place, ticks = 0.0, []
    for row in rows:
        first = place
        for name, speed in row.speeds.items():
            relative = speed / row.speeds["sdpa"]
            left.barh(place, relative, color=COLORS[name], height=0.8)
            left.text(relative + 0.01, place, f"{relative:.2f}", va="center", fontsize=8)
            place += 0.85
        ticks.append(((first + place - 0.85) / 2, row.part))
        place += 0.5
    left.set_yticks([y for y, _ in ticks], [name.replace(", ", "\n", 1) for _, name in ticks])
    left.invert_yaxis()
    left.set_xlim(0, 1.1 * max(x / row.speeds["sdpa"] for row in rows for x in row.speeds.values()))
    left.set_title("Llama of 1B parameters on an H200,\ntokens/s relative to sdpa", fontsize=9, loc="left")
    left.spines[["top", "right"]].set_visible(False)
    shown = [name for name in COLORS if any(name in row.speeds for row in rows)]
    patches = [plt.Rectangle((0, 0), 1, 1, color=COLORS[name]) for name in shown]
    left.legend(
        patches,
        [NAMES[name] for name in shown],
        fontsize=8,
        frameon=False,
        ncols=3,
        loc="upper center",
        bbox_to_anchor=(0.4, -0.1),
    )
    right.axis("off")
    edge = -0.8 if narrow else 0  # below the names of the bars
    right.set_title("In one function, and together\n", fontsize=9, loc="left", x=edge, in_layout=not narrow)
    for n, feature in enumerate(FEATURES):
        right.text(
            edge, 0.93 - 0.125 * n, f"✓  {feature}", va="center", transform=right.transAxes, in_layout=not narrow
        )
    figure.tight_layout(h_pad=4)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    draw(IMAGES / "llama.svg")
    draw(IMAGES / "llama-narrow.svg", narrow=True)
