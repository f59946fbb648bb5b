"""The backward pass of `scores`: from the gradient of the final score to the product's, feature by feature."""

from collections import namedtuple

import torch
from torch import Tensor

from ...call.call import FEATURES, Call, Gradients, Needs
from ...private_torch import recording_graph
from .scores import Scores, Tile, cast_floating, slab_part, slopes_4d, tile_part
from .sums import TERMS_PER_CARRY, Sum
from .tiles import Slab


class FeatureGradients(namedtuple("FeatureGradients", Needs._fields[3:])):
    """Gradients of the score features, as sums in the accumulation dtype; `None` for those not requested."""

    @classmethod
    def zeros(cls, call: Call, needs: Needs, dtype: torch.dtype) -> "FeatureGradients":
        def new_sum(x: Tensor | None, needed: bool, every: int | None = TERMS_PER_CARRY) -> Sum | None:
            if x is None or not needed:
                return None
            return Sum(torch.zeros(x.shape, dtype=dtype, device=x.device), every)

        def sum_of(name: str) -> Sum | None:
            x, needed = getattr(call.tensors, name), getattr(needs, name)
            if x is None or not FEATURES[name].broadcasts:
                return new_sum(x, needed)
            # Each term is added to one part of a gradient of pairs, so carry that part at once.
            return new_sum(x, needed, every=1 if 1 in x.shape else None)

        modifiers = zip(call.tensors.score_mod_tensors, needs.score_mod_tensors, strict=True)
        return cls(*(sum_of(name) for name in cls._fields[:-1]), tuple(new_sum(*modifier) for modifier in modifiers))

    def results(self) -> Gradients:
        """The features' gradients, without dq, dk and dv."""
        *features, modifiers = self
        return Gradients(None, None, None, *(result_of(x) for x in features), tuple(result_of(x) for x in modifiers))


def result_of(total: Sum | None) -> Tensor | None:
    return None if total is None else total.result()


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
    unmodified = scores.add_terms(capped, tile)
    with recording_graph():
        if visible is not None:  # a NaN there would enter the function's derivatives
            unmodified.masked_fill_(~visible, 0)  # in place: nothing else needs hidden scores
        score = unmodified.detach().requires_grad_()
        tensors = [
            cast_floating(x, scores.dtype).detach().requires_grad_(total is not None)
            for x, total in zip(scores.score_mod_tensors, gradients.score_mod_tensors, strict=False)
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
