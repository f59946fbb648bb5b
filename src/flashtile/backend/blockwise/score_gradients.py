"""The backward pass of `scores`: from the gradient of the final score to that of the product, feature by feature."""

import torch
from torch import Tensor

from ...call.call import Call, Needs
from .scores import Scores, Tile, cast_floating, slab_part, slopes_4d, tile_part, zero_hidden
from .sums import TERMS_PER_CARRY, Sum
from .tiles import Slab


class FeatureGradients:
    """Gradients of the score features, as sums in the accumulation dtype; `None` for those not requested."""

    def __init__(self, call: Call, needs: Needs, dtype: torch.dtype):
        def new_sum(x: Tensor | None, needed: bool, every: int | None = TERMS_PER_CARRY) -> Sum | None:
            if x is None or not needed:
                return None
            return Sum(torch.zeros(x.shape, dtype=dtype, device=x.device), every)

        tensors = call.tensors
        shared = tensors.bias is not None and 1 in tensors.bias.shape
        # Each term is added to one part of dbias, so carry that part at once.
        self.bias = new_sum(tensors.bias, needs.bias, every=1 if shared else None)
        self.alibi_slopes = new_sum(tensors.alibi_slopes, needs.alibi_slopes)
        self.sinks = new_sum(tensors.sinks, needs.sinks)
        self.score_mod_tensors = [
            new_sum(x, needed) for x, needed in zip(tensors.score_mod_tensors, needs.score_mod_tensors, strict=True)
        ]


def scores_backward(
    scores: Scores,
    product: Tensor,
    ds: Tensor,
    visible: Tensor | None,
    tile: Tile,
    slab: Slab,
    gradients: FeatureGradients,
) -> Tensor:
    """The gradient of `product = scale * <q, k>` from the gradient `ds` of the final score, both `[B, H, M, N]`. Adds
    the tile's part of the gradients of bias, slopes and score_mod tensors.
    """
    capped = product if scores.softcap is None else scores.softcap * torch.tanh(product / scores.softcap)
    if scores.score_mod is not None:
        ds = score_mod_backward(scores, capped, ds, visible, tile, gradients)
    if gradients.alibi_slopes is not None:
        slopes = gradients.alibi_slopes.recent
        batch = slab_part(slopes_4d(slopes), slab).shape[0]
        dslopes = (ds * scores.distance(tile)).sum_to_size(batch, ds.shape[1], 1, 1)
        gradients.alibi_slopes.add(-dslopes, lambda x: slab_part(slopes_4d(x), slab))
    if gradients.bias is not None:
        shape = tile_part(slab_part(gradients.bias.recent, slab), tile).shape
        gradients.bias.add(ds.sum_to_size(shape), lambda x: tile_part(slab_part(x, slab), tile))
    if scores.softcap is not None:
        ds = ds * (1 - (capped / scores.softcap) ** 2)
    return ds


def score_mod_backward(
    scores: Scores, capped: Tensor, ds: Tensor, visible: Tensor | None, tile: Tile, gradients: FeatureGradients
) -> Tensor:
    """Differentiate the user's score_mod on this tile, by torch.autograd."""
    unmodified = capped
    if scores.bias is not None:
        unmodified = unmodified + tile_part(scores.bias, tile).to(scores.dtype)
    if scores.slopes is not None:
        unmodified = unmodified - scores.slopes * scores.distance(tile)
    with torch.enable_grad():
        score = zero_hidden(unmodified, visible).detach().requires_grad_()
        tensors = [
            cast_floating(x, scores.dtype).detach().requires_grad_(total is not None)
            for x, total in zip(scores.score_mod_tensors, gradients.score_mod_tensors, strict=True)
        ]
        modified = scores.modify(score, tile, tensors)
    inputs = [score, *(x for x in tensors if x.requires_grad)]
    if not modified.requires_grad:  # the function ignores the score and all tensors that need a gradient
        return torch.zeros_like(ds)
    dscore, *dtensors = torch.autograd.grad(modified, inputs, ds, allow_unused=True, materialize_grads=True)
    totals = [total for total in gradients.score_mod_tensors if total is not None]
    for total, dtensor in zip(totals, dtensors, strict=True):
        total.add(dtensor)
    return dscore if visible is None else torch.where(visible, dscore, 0)
