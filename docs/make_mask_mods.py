"""Draw docs/images/mask_mods.svg, a panel for each of `flashtile.mask_mods`: `python docs/make_mask_mods.py`.

A panel shows the visible pairs of 48 queries and keys, and behind them blocks of 8 x 8: hidden, partly visible and full
ones.
"""

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap

from flashtile import MaskMod, mask_mods
from flashtile.expression import mask_mod_function

PICTURE = Path(__file__).parent / "images" / "mask_mods.svg"
N, BLOCK = 48, 8
COLORS = ListedColormap(["#ffffff", "#dce6f2", "#7f9fc6", "#1f4e8c"])  # hidden; partial: hidden, visible pairs; full
IDS = torch.tensor([0] * 10 + [1] * 22 + [2] * 16)
PARENTS = torch.tensor([-1, *((n - 1) // 3 for n in range(1, N))])
STARTS = torch.tensor([N] * 16 + [16 + n // 8 * 8 + 8 for n in range(32)])  # of a question with four answers
PANELS = {
    "causal": mask_mods.causal(),
    "window": mask_mods.window(9, 2),
    "prefix": mask_mods.prefix(torch.tensor([13])),
    "document": mask_mods.document(IDS),
    "dilated": mask_mods.dilated(16, 4),
    "neighborhood 1-D": mask_mods.neighborhood((N,), (9,)),
    "neighborhood 2-D": mask_mods.neighborhood((6, 8), (3, 5)),
    "block_diffusion": mask_mods.block_diffusion(N // 2, 4),
    "flashmask": mask_mods.flashmask(STARTS[None, None, :, None], causal=True),
    "tree": mask_mods.tree(PARENTS),
    "and_masks": mask_mods.and_masks(mask_mods.causal(), mask_mods.document(IDS)),
    "or_masks": mask_mods.or_masks(mask_mods.window(3, 3), lambda b, h, q_idx, k_idx: k_idx < 6),
}


def shades(mod: MaskMod) -> torch.Tensor:
    """The color of each pair, `[N, N]`."""
    i, j, zero = torch.arange(N)[:, None], torch.arange(N), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    visible = mask_mod_function(mod.key)(zero, zero, i, j, *mod.tensors).expand(1, 1, N, N)[0, 0]
    blocks = visible.view(N // BLOCK, BLOCK, N // BLOCK, BLOCK)
    some, full = blocks.any(3).any(1), blocks.all(3).all(1)
    some, full = (x.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1) for x in (some, full))
    return torch.where(full, 3, torch.where(visible, 2, some.int()))


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "flashtile", "svg.fonttype": "none"})
    figure, axes = plt.subplots(2, 6, figsize=(12, 4.7))
    for ax in axes.flat[len(PANELS) :]:
        ax.axis("off")
    for ax, (name, mod) in zip(axes.flat, PANELS.items(), strict=False):
        ax.imshow(shades(mod), cmap=COLORS, vmin=0, vmax=3)
        ax.set(title=name, xticks=[], yticks=[])
    axes[0, 0].set(xlabel="key", ylabel="query")
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
