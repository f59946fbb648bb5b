"""Table of the blocks that intervals cannot decide: hidden or full ones that count as partly visible."""

from collections.abc import Callable

import torch
from cells import markdown

from flashtile import MaskMod, mask_mods
from flashtile.expression import Formula, mask_mod_formula
from flashtile.expression.blocks import PARTIAL, Blocks, block_visibility, positions

S, SIZE = 504, 32  # positions, and those of a block
CPU = torch.device("cpu")


def masks() -> dict[str, MaskMod]:
    """Ready masks, whose sizes are no multiples of those of blocks."""
    ids = torch.repeat_interleave(torch.tensor([90, 40, 150, 75, 149]))
    start = torch.where(torch.arange(S) < 120, S, torch.arange(S) // 98 * 98 + 98)  # a question with answers
    return {
        "causal": mask_mods.causal(),
        "window": mask_mods.window(70, 30),
        "prefix": mask_mods.prefix(torch.tensor([100])),
        "document": mask_mods.document(ids),
        "dilated": mask_mods.dilated(200, 50),
        "neighborhood": mask_mods.neighborhood((14, 36), (5, 7)),
        "block_diffusion": mask_mods.block_diffusion(S // 2, 20),
        "flashmask": mask_mods.flashmask(start[None, None, :, None], causal=True),
    }


def excess(mod: MaskMod) -> float:
    """The part of all hidden and full blocks that count as partly visible."""
    formula, one, i = mask_mod_formula(mod.key), torch.zeros(1, dtype=torch.int64), torch.arange(S)
    assert isinstance(formula, Formula)
    blocks = Blocks(one, one, positions(0, S, SIZE, CPU), positions(0, S, SIZE, CPU))
    found = block_visibility(formula, mod.tensors, blocks, torch.float32)
    visible = formula(one.view(1, 1, 1, 1), one.view(1, 1, 1), i[:, None], i, *mod.tensors)
    of_rows = visible.expand(1, 1, S, S)[0, 0].split(SIZE)
    decided = torch.tensor([[bool((x == x[0, 0]).all()) for x in rows.split(SIZE, dim=1)] for rows in of_rows])
    return float((found.expand(1, 1, *decided.shape)[0, 0][decided] == PARTIAL).float().mean())


def block_excess() -> str:
    """A row and a column for each mask: `or_masks` right of the diagonal, `and_masks` left of it."""
    named = masks()
    body = []
    for row, (name, mod) in enumerate(named.items()):
        cells = []
        for column, other in enumerate(named.values()):
            combine: Callable[..., MaskMod] = mask_mods.or_masks if row < column else mask_mods.and_masks
            cells.append(f"{100 * excess(mod if row == column else combine(mod, other)):.0f}%")
        body.append([f"`{name}`", *cells])
    return markdown(("", *(f"`{name}`" for name in named)), body)


TABLES = {"block_excess": block_excess}
