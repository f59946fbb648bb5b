"""Draw docs/images/score_mods.svg, a panel for each of `flashtile.score_mods`: `python docs/make_score_mods.py`.

A panel shows what the function adds to scores of 0 or, where it scales them, what becomes of scores that fall with the
distance.
"""

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch

from flashtile import score_mods
from flashtile.expression import score_mod_function

PICTURE = Path(__file__).parent / "images" / "score_mods.svg"
N, BUCKETS = 48, 16
TABLE = torch.sin(torch.arange(17) * 0.9)
PANELS = {
    "alibi": (score_mods.alibi(torch.tensor([0.1])), 0.0),
    "decay": (score_mods.decay(torch.tensor([0.9])), 0.0),
    "relative_table": (score_mods.relative_table(TABLE[None]), 0.0),
    "t5_buckets": (score_mods.t5_buckets(torch.linspace(-1, 1, BUCKETS)[:, None], 40), 0.0),
    "softcap": (score_mods.softcap(1.0), 1.0),
    "tanh_gate": (score_mods.tanh_gate(torch.tensor([0.3])), 1.0),
    "temperature": (score_mods.temperature(torch.tensor([2.0])), 1.0),
}


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "flashtile", "svg.fonttype": "none"})
    figure, axes = plt.subplots(1, len(PANELS), figsize=(2 * len(PANELS), 2.3))
    i, j = torch.arange(N)[None, None, :, None], torch.arange(N)[None, None, None]
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    for ax, (name, (mod, slope)) in zip(axes, PANELS.items(), strict=True):
        score = slope * (3 - 0.15 * (i - j).abs())
        ax.imshow(score_mod_function(mod.key)(score, zero, zero, i, j, *mod.tensors)[0, 0], cmap="viridis")
        ax.set(title=name, xticks=[], yticks=[])
    axes[0].set(xlabel="key", ylabel="query")
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
