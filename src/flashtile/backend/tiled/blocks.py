"""Tiles of a slab that a mask function hides or shows in full."""

from torch import Tensor

from ... import private_torch
from ...call import device
from ...expression import Formula
from ...expression.blocks import PARTIAL, Blocks, block_visibility, positions
from ..blockwise.scores import Scores
from ..blockwise.tiles import TileShape

States = list[list[int]]


def mask_states(scores: Scores, shape: TileShape) -> States | None:
    """The state of each tile of a slab, by blocks of rows and of keys, for all its sequences and heads together. `None`
    if each tile may have hidden pairs: without a formula of the mask, where the host cannot read its tensors, under
    transforms, and for a single tile.
    """
    if shape not in scores.mask_states:
        scores.mask_states[shape] = computed(scores, shape)
    return scores.mask_states[shape]


def computed(scores: Scores, shape: TileShape) -> States | None:
    formula, slab, settings = scores.mask_mod, scores.slab, scores.settings
    tensors = [scores.b, *scores.mask_mod_tensors]
    few = slab.seqlen_q <= shape.block_m and slab.seqlen_k <= shape.block_n
    if few or not isinstance(formula, Formula) or not all(readable(x) for x in tensors):
        return None
    blocks = Blocks(
        scores.b.flatten(),
        scores.h.flatten(),
        positions(settings.i0, slab.seqlen_q, shape.block_m, scores.b.device),
        positions(settings.j0, slab.seqlen_k, shape.block_n, scores.b.device),
    )
    states = block_visibility(formula, scores.mask_mod_tensors, blocks, scores.dtype)
    low, high = states.amin(dim=(0, 1)), states.amax(dim=(0, 1))
    together: States = low.where(low == high, PARTIAL).tolist()
    return together


def readable(x: Tensor) -> bool:
    return device.host_readable(x) and not private_torch.is_functorch_wrapped_tensor(x)
