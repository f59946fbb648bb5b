"""Score features: one forward line each and, in reverse order, its gradient (in `score_gradients`).

s = scale * <q, k>                      the caller's matrix product
s = softcap * tanh(s / softcap)         ds *= 1 - tanh(s / softcap) ** 2
s = s + bias                            dbias += ds, summed over broadcast dimensions
s = s - slope * |i + Sk - Sq - j|       dslope -= ds * |i + Sk - Sq - j|
s = score_mod(s, b, h, i, j)            by torch.autograd on the tile
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...call.call import Call
from ...expression import mask_mod_function, score_mod_function
from . import rng
from .functions import call_mask_mod, call_score_mod
from .masking import all_of, window_visible
from .tiles import Slab, TileShape


class Tile(NamedTuple):
    """A rectangle of scores: positions relative to the slab, and whether the window shows every pair in it, and whether
    the mask function does.
    """

    rows: slice
    keys: slice
    full: bool
    unmasked: bool = False


class Scores:
    """The score features of one slab, with its slices of bias, slopes, mask and sinks."""

    def __init__(self, call: Call, slab: Slab, dtype: torch.dtype):
        tensors, settings = call.tensors, call.settings
        self.settings, self.slab, self.dtype = settings, slab, dtype
        self.num_heads = call.num_heads
        device = tensors.q.device
        heads = torch.arange(slab.heads_q.start, slab.heads_q.stop, device=device)
        batch = torch.arange(slab.batch.start, slab.batch.stop, device=device)
        self.h = (heads + settings.h0)[:, None, None]  # [H, 1, 1]
        self.b = (batch + settings.b0)[:, None, None, None]  # [B, 1, 1, 1]
        self.softcap = settings.softcap
        self.mask = None if tensors.mask is None else slab_part(tensors.mask, slab)  # [B|1, H|1, Sq|1, Sk|1]
        self.bias = None if tensors.bias is None else slab_part(tensors.bias, slab)  # [B|1, H|1, Sq|1, Sk|1]
        self.slopes = None
        if tensors.alibi_slopes is not None:
            self.slopes = slab_part(slopes_4d(tensors.alibi_slopes), slab).to(dtype)  # [B|1, H, 1, 1]
        self.sinks = None
        if tensors.sinks is not None:
            self.sinks = tensors.sinks[slab.heads_q, None, None].to(dtype)  # [H, 1, 1]
        captured, of_score = [cast_floating(x, dtype) for x in tensors.score_mod_tensors], call.num_score_tensors
        self.score_mod = None if settings.score_mod is None else score_mod_function(settings.score_mod)
        self.mask_mod = None if settings.mask_mod is None else mask_mod_function(settings.mask_mod)
        self.score_mod_tensors, self.mask_mod_tensors = captured[:of_score], captured[of_score:]
        self.seed = tensors.dropout_seed if settings.dropout_p > 0 else None
        self.mask_states: dict[TileShape, list[list[int]] | None] = {}  # states of tiles, by `tiled.blocks`

    def positions(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Positions of the tile's rows `[M, 1]` and keys `[N]` in the whole sequence."""
        device = self.b.device
        rows = torch.arange(tile.rows.start, tile.rows.stop, device=device)[:, None] + self.settings.i0
        keys = torch.arange(tile.keys.start, tile.keys.stop, device=device) + self.settings.j0
        return rows, keys

    def visible(self, tile: Tile, query_exists: Tensor | None, key_exists: Tensor | None) -> Tensor | None:
        """Visible pairs, bool broadcastable to `[B, H, M, N]`; `None` if all are."""
        conditions = []
        if not tile.full:
            in_window = window_visible(self.settings.window, *self.positions(tile), self.slab.diagonal)
            conditions += [] if in_window is None else [in_window]
        if self.mask is not None:
            conditions.append(tile_part(self.mask, tile))
        if self.mask_mod is not None and not tile.unmasked:
            conditions.append(self.visible_by_function(tile))
        if query_exists is not None:
            conditions.append(query_exists[:, None, :, None])
        if key_exists is not None:
            conditions.append(key_exists[:, None, None, :])
        return all_of(conditions)

    def visible_by_function(self, tile: Tile) -> Tensor:
        """The pairs that the mask function shows."""
        assert self.mask_mod is not None
        indices = (self.b, self.h[None], *self.positions(tile))
        return call_mask_mod(self.mask_mod, indices, self.mask_mod_tensors, self.shape(tile), self.dtype)

    def shape(self, tile: Tile) -> tuple[int, ...]:
        """`[B, H, M, N]`"""
        return len(self.b), len(self.h), tile.rows.stop - tile.rows.start, tile.keys.stop - tile.keys.start

    def forward(self, s: Tensor, tile: Tile, visible: Tensor | None) -> Tensor:
        """The final scores from `s = scale * <q, k>`, `[B, H, M, N]`, before masking."""
        if self.softcap is not None:
            s = self.softcap * torch.tanh(s / self.softcap)
        s = self.add_terms(s, tile)
        if self.score_mod is not None:
            s = self.modify(zero_hidden(s, visible), tile, self.score_mod_tensors)
        return s

    def add_terms(self, s: Tensor, tile: Tile) -> Tensor:
        """The scores with all that is added to them."""
        if self.bias is not None:
            s = s + tile_part(self.bias, tile).to(self.dtype)
        if self.slopes is not None:
            s = s - self.slopes * self.distance(tile)
        return s

    def distance(self, tile: Tile) -> Tensor:
        rows, keys = self.positions(tile)
        return (rows + self.slab.diagonal - keys).abs().to(self.dtype)  # [(B, 1,) M, N]

    def modify(self, s: Tensor, tile: Tile, tensors: list[Tensor]) -> Tensor:
        assert self.score_mod is not None
        rows, keys = self.positions(tile)
        modified = call_score_mod(self.score_mod, s, (self.b, self.h[None], rows, keys), tensors)
        return modified.to(self.dtype).expand(s.shape)

    def keep(self, tile: Tile) -> Tensor | None:
        """The dropout factor of each pair, `[B, H, M, N]`; `None` without dropout."""
        if self.seed is None:
            return None
        rows, _ = self.positions(tile)
        first_key = tile.keys.start + self.settings.j0
        num_keys = tile.keys.stop - tile.keys.start
        sequence_head = self.b * self.num_heads + self.h  # [B, H, 1, 1]
        return rng.keep_factor(self.seed, self.settings.dropout_p, sequence_head, rows, first_key, num_keys, self.dtype)


def zero_hidden(s: Tensor, visible: Tensor | None) -> Tensor:
    """Set hidden scores to 0 for a user's function: a NaN there would enter the function's derivatives."""
    return s if visible is None else torch.where(visible, s, 0)


def cast_floating(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def slopes_4d(slopes: Tensor) -> Tensor:
    """`[H]` or `[B, H]` to `[B|1, H, 1, 1]`."""
    return (slopes if slopes.dim() == 2 else slopes[None])[..., None, None]


def slab_part(x: Tensor, slab: Slab) -> Tensor:
    """A slab's part of a tensor `[B|1, H|1, ...]`."""
    batch = slab.batch if x.shape[0] != 1 else slice(None)
    heads = slab.heads_q if x.shape[1] != 1 else slice(None)
    return x[batch, heads]


def tile_part(x: Tensor, tile: Tile) -> Tensor:
    """A tile's part of a slab's tensor `[B|1, H|1, Sq|1, Sk|1]`."""
    rows = tile.rows if x.shape[2] != 1 else slice(None)
    keys = tile.keys if x.shape[3] != 1 else slice(None)
    return x[:, :, rows, keys]
