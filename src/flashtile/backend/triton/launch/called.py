"""Pick a call's tiles from its plan, which serves a bucket of calls, by the precision of float32 and `num_splits`."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ....call.call import Call, Needs
from ...epilogue import requested_from_rows
from ...gpu.precision import allows_tf32
from ...scalars import rows_last
from ..plan.candidates import by_tf32
from ..tile_config import FusedConfig, TileConfig

MOST_STRIDE = 2**20  # elements from row to row of the fused kernel's tensors


def called_tile(tile: TileConfig, call: Call) -> TileConfig:
    """The configurations for the precision that is allowed now, and for the number of splits that the caller chose."""
    tile = by_tf32(tile) if allows_tf32() else tile
    if call.settings.requested_splits is None or tile.given_splits is None:
        return tile
    return tile._replace(forward=tile.given_splits)


def multiplies(tile: TileConfig, needs: Needs) -> bool:
    """Whether PyTorch multiplies in backward, for any of the gradients that products give."""
    return tile.products_backward is not None and (needs.q or needs.k or needs.v or needs.alibi_slopes)


def is_fused(config: FusedConfig, call: Call, needs: Needs, rows: Sequence[Tensor]) -> bool:
    """Whether one kernel makes all gradients: dq, dk and dv, none that needs statistics of rows, and a bias' gradient
    where a dense head is one tile. Within a block, its offsets into `rows` have 32 bits, and with dropout its blocks of
    keys begin where eight keys share random bits.
    """
    settings = call.settings
    aligned = settings.dropout_p == 0 or settings.j0 % 8 == 0
    used = call.tensors.seqused_q is not None or call.tensors.seqused_k is not None
    other = used or requested_from_rows(needs, call.tensors) or any(needs.score_mod_tensors)
    near = all(x.stride(-2 if call.layout == "dense" else 0) < MOST_STRIDE for x in rows)
    bias = not needs.bias or (config.walk is None and call.layout == "dense")
    return needs.q and needs.k and needs.v and near and aligned and bias and not other


def is_one_loop(tile: TileConfig, needs: Needs) -> bool:
    """Whether one kernel makes dq, dk and dv; it makes no gradients of slopes."""
    return tile.one_loop is not None and needs.q and (needs.k or needs.v) and not needs.alibi_slopes


def tiles(tile: TileConfig, call: Call, needs: Needs | None) -> dict[str, Any]:
    """The configurations of the kernels that run in forward or, with `needs`, in backward, by name."""
    tile = called_tile(tile, call)
    if needs is None and tile.products is not None:
        return {"products": tile.products}
    if needs is None:
        return {"forward": tile.forward, "pack_gqa": tile.pack_gqa if tile.pack_gqa > 1 else None}
    dbias = (tile.dbias or tile.dq) if needs.bias else None
    if multiplies(tile, needs):
        return {"products in backward": tile.products_backward, "dbias": dbias}
    if tile.fused is not None and is_fused(tile.fused, call, needs, [rows_last(x) for x in call.tensors[:3]]):
        return {"fused": tile.fused}
    if is_one_loop(tile, needs):
        return {"one loop": tile.one_loop, "dbias": dbias}
    return {
        "dkdv": tile.dkdv if needs.k or needs.v else None,
        "dq": tile.dq if needs.q or needs.alibi_slopes else None,
        "dbias": dbias,
    }
