"""Planning for the tiled backend, which supports every problem: tile sizes."""

from typing import TYPE_CHECKING

from ...call.device import Device
from ...call.problem import Problem

if TYPE_CHECKING:
    from ..blockwise.tiles import TileShape

SUMMARY = "torch operations, block by block: any device, every feature"
BLOCK_M, BLOCK_N = 256, 512
# Scores of one tile over all its heads and sequences. A few tiles of this size are in memory at a time. Smaller tiles
# would spend their time on the overhead of about thirty torch operations each.
TILE_SCORES = 2**20


def unusable() -> str | None:
    """The reason why this backend cannot run on this machine; `None` if it can."""
    return None


def declines(problem: Problem, device: Device) -> str | None:
    return None


def tile(problem: Problem, device: Device) -> "TileShape":
    from ..blockwise.tiles import TileShape  # deferred: `import flashtile` must be fast

    block_m = min(BLOCK_M, max(problem.seqlen_q, 1))
    block_n = min(BLOCK_N, max(problem.seqlen_k, 1))
    group = problem.num_heads_q // max(problem.num_heads_kv, 1)
    pairs = TILE_SCORES // (block_m * block_n * max(group, 1))  # key/value heads times sequences
    heads_kv = max(1, min(problem.num_heads_kv, pairs))
    batch = max(1, min(problem.batch, pairs // heads_kv))
    return TileShape(block_m, block_n, heads_kv, batch)


def row_block_scores(device_type: str) -> int:
    """Scores of one row block over all its keys, heads and sequences where `transforms` differentiates. A block takes
    the host milliseconds, in which a GPU computes more scores than a CPU.
    """
    return TILE_SCORES if device_type == "cpu" else TILE_SCORES * 16


def num_splits(problem: Problem, device: Device) -> int:
    """Keys are never split."""
    return 1
