"""Tiles of keys and values in the accumulation dtype; numbers of 8 bits are multiplied by their scales."""

import torch
from torch import Tensor

from ...call.call import Call
from ...call.eight_bit import bits, is_eight_bit, number, scales_of_pages
from .tiles import GatheredRows, Rows, Slab


class KeyRows:
    """Rows of k or v as numbers of `dtype`."""

    def __init__(self, rows: Rows, dtype: torch.dtype):
        self.rows, self.dtype = rows, dtype

    def load(self, positions: slice) -> Tensor:
        return self.rows.load(positions).to(self.dtype)

    def exists(self, positions: slice) -> Tensor | None:
        return self.rows.exists(positions)


class EightBitRows(KeyRows):
    """Rows of pages of 8 bits."""

    def __init__(self, rows: GatheredRows, dtype: torch.dtype, of: torch.dtype, descale: Tensor | None):
        super().__init__(rows, dtype)
        self.index, self.of, self.descale = rows.index, of, descale  # [B|1, num_pages|1, page_size|1, H]

    def load(self, positions: slice) -> Tensor:
        tile = self.rows.load(positions).view(self.of).to(self.dtype)
        if self.descale is None:
            return tile
        token, exists = self.index.tokens(positions)
        token = torch.where(exists, token, 0)
        sequence = torch.arange(token.shape[0], device=token.device)[:, None].expand_as(token)
        page, slot = token // self.index.page_size, token % self.index.page_size
        scale = number(self.descale, sequence, page, slot)  # [B, n, H]
        assert isinstance(scale, Tensor)
        scale = torch.where(exists[..., None], scale, 0).to(self.dtype)
        return tile * scale.transpose(1, 2)[..., None]


def key_and_value_rows(call: Call, slab: Slab, dtype: torch.dtype) -> tuple[KeyRows, KeyRows]:
    """A slab's rows of k and v."""
    t = call.tensors
    k, v = (key_rows(call, slab, x, descale, dtype) for x, descale in ((t.k, t.k_descale), (t.v, t.v_descale)))
    return k, v


def key_rows(call: Call, slab: Slab, x: Tensor, descale: Tensor | None, dtype: torch.dtype) -> KeyRows:
    if not is_eight_bit(x):
        return KeyRows(slab.key_rows(x), dtype)
    rows = slab.key_rows(bits(x))
    assert isinstance(rows, GatheredRows)  # checked: of pages alone
    if descale is not None:
        descale = scales_of_pages(descale, call.tensors.k, slab.keys.batch, paged=True)
        assert descale is not None
        batch = slab.batch if descale.shape[0] > 1 else slice(None)
        descale = descale[batch, ..., slab.heads_kv]
    return EightBitRows(rows, dtype, x.dtype, descale)
