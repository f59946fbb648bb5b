"""Planning for the tiled backend, which supports every problem: tile sizes."""

from typing import TYPE_CHECKING

from ...call.call import Call, Needs
from ...call.device import Device
from ...call.eight_bit import PACKED, READS_A_COPY
from ...call.plan import Candidate, Plan
from ...call.problem import Problem
from ...call.window import visible_pairs
from ..blockwise import PRODUCTS_OF_PYTORCH

if TYPE_CHECKING:
    from ..blockwise.tiles import TileShape

SUMMARY = "torch operations, block by block: any device, every feature"
BLOCK_M, BLOCK_N = 256, 512
# Scores of one tile over all its heads and sequences. A few tiles of this size are in memory at a time. Smaller tiles
# would spend their time on the overhead of about thirty torch operations each.
TILE_SCORES = 2**20
# A GPU computes more scores in the time that the host takes for an operation (H200, float32 at head dimension 512:
# forward of 4 x 4096 rows takes 56 ms with the tiles of a CPU and 4.1 with these).
GPU_BLOCK_M, GPU_BLOCK_N, GPU_TILE_SCORES = 4096, 2048, 2**25
# Microseconds on a GPU: of a score in memory, of a product of float32, and of a tile's thirty operations.
SCORE, PRODUCT, OPERATIONS = 6e-5, 4e-8, 150.0
BACKWARD_PASSES = TANGENT_PASSES = 3  # forward passes in backward on a GPU, and in one with tangents, by its products,
SECOND_PASSES = 12  # and in a second derivative


def unusable() -> str | None:
    """The reason why this backend cannot run on this machine; `None` if it can."""
    return None


def declines(problem: Problem, device: Device) -> str | None:
    """Why the backend does not take a problem; `None` if it does."""
    if problem.eight_bit == PACKED:
        return READS_A_COPY
    return PRODUCTS_OF_PYTORCH if problem.batch_invariant else None


def candidates(problem: Problem, device: Device, needs: Needs | None) -> list[Candidate]:
    """The one way to run a pass, and its time."""
    shape = tile(problem, device)
    return [Candidate(shape, 1, time(problem, device, shape, backward=needs is not None))]


def time(problem: Problem, device: Device, shape: "TileShape", *, backward: bool) -> float:
    """Microseconds of products and elementwise operations of all scores, in the accumulation dtype; on a CPU, where
    another backend has measured rates, on one thread.
    """
    if device.type == "cpu":
        from ..cpu_cost import tiled_time  # not needed otherwise

        return tiled_time(problem, shape, backward=backward)
    p, passes = problem, BACKWARD_PASSES if backward else 1
    pairs = p.counts.batch * p.num_heads_q * visible_pairs(p.window, p.counts.rows, p.counts.keys)
    tiles = -(-p.seqlen_q // shape.block_m) * -(-p.seqlen_k // shape.block_n)
    tiles *= -(-p.num_heads_kv // shape.heads_kv) * -(-p.batch // shape.batch)
    return passes * (pairs * (SCORE + PRODUCT * (p.head_dim + p.head_dim_v)) + tiles * OPERATIONS)


def tangent_candidates(problem: Problem, device: Device, moves: Needs) -> list[Candidate]:
    """The one way to run a forward pass with tangents: three times the products of a forward pass."""
    (way,) = candidates(problem, device, None)
    return [way._replace(microseconds=TANGENT_PASSES * way.microseconds)]


def second_candidates(problem: Problem, device: Device, moves: Needs, needs: Needs) -> list[Candidate]:
    """The one way to compute a second derivative, of operations that PyTorch differentiates."""
    (way,) = candidates(problem, device, None)
    return [way._replace(microseconds=SECOND_PASSES * way.microseconds)]


def tile(problem: Problem, device: Device) -> "TileShape":
    from ..blockwise.tiles import TileShape  # deferred: `import flashtile` must be fast

    most_m, most_n, scores = BLOCK_M, BLOCK_N, TILE_SCORES
    if device.type == "cuda":
        most_m, most_n, scores = GPU_BLOCK_M, GPU_BLOCK_N, GPU_TILE_SCORES
    block_m, block_n = min(most_m, max(problem.seqlen_q, 1)), min(most_n, max(problem.seqlen_k, 1))
    group = problem.num_heads_q // max(problem.num_heads_kv, 1)
    pairs = scores // (block_m * block_n * max(group, 1))  # key/value heads times sequences
    heads_kv = max(1, min(problem.num_heads_kv, pairs))
    batch = max(1, min(problem.batch, pairs // heads_kv))
    return TileShape(block_m, block_n, heads_kv, batch)


def row_block_scores(device_type: str) -> int:
    """Scores of one row block over all its keys, heads and sequences where `transforms` differentiates. A block takes
    the host milliseconds, in which a GPU computes more scores than a CPU. Second derivatives of a block of 2**26 scores
    take 1.9 GiB.
    """
    return TILE_SCORES if device_type == "cpu" else 2**26


def unsplit(plan: Plan, call: Call) -> str:
    return f"{plan.backend} takes keys in order"
