"""The tiles of a call, of those in its plan, which is for several calls and for each precision that PyTorch allows."""

from typing import Any

from ...call.call import Call, Needs
from ..gpu.precision import allows_tf32
from ..scalars import rows_last
from .host_fused import takes
from .plan.candidates import by_tf32
from .tile_config import TileConfig


def called_tile(tile: TileConfig, call: Call) -> TileConfig:
    """The configurations for the precision that is allowed now, and for the number of splits that the caller chose."""
    tile = by_tf32(tile) if allows_tf32() else tile
    if call.settings.num_splits is None or tile.given_splits is None:
        return tile
    return tile._replace(forward=tile.given_splits)


def multiplies(tile: TileConfig, needs: Needs) -> bool:
    """Whether PyTorch multiplies in backward, for any of the gradients that products give."""
    return tile.products_backward is not None and (needs.q or needs.k or needs.v or needs.alibi_slopes)


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
    if tile.fused is not None and takes(tile.fused, call, needs, [rows_last(x) for x in call.tensors[:3]]):
        return {"fused": tile.fused}
    return {
        "dkdv": tile.dkdv if needs.k or needs.v else None,
        "dq": tile.dq if needs.q or needs.alibi_slopes else None,
        "dbias": dbias,
    }
