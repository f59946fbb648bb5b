"""Arguments of the tile scheduler for tiles of rows (`kernels.shared.tile_scheduler`)."""

from ....call.call import Call
from ..backward_config import DqConfig
from ..tile_config import Float32Forward, ForwardConfig, TangentsConfig


def scheduler_args(call: Call, config: ForwardConfig | Float32Forward | DqConfig | TangentsConfig) -> dict[str, int]:
    """Scheduler arguments of a kernel of tiles of rows."""
    if call.tensors.cu_seqlens_q is not None:
        return packed_scheduler_args(call, config.block_m)
    batch, heads, seqlen_q, _ = call.tensors.q.shape
    blocks = -(-seqlen_q // config.block_m)
    return {
        "num_tiles": blocks * heads * batch,
        "num_blocks": blocks,
        "total_heads": heads * batch,
        "l2_swizzle": min(config.heads_at_once * query_group(call), heads * batch),
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_k": room_for_keys(call),
    }


def packed_scheduler_args(call: Call, block_m: int) -> dict[str, int]:
    """Sequence lengths are unknown to the host: token counts, and an upper bound of the tiles."""
    tokens, heads, _ = call.tensors.q.shape
    assert call.tensors.cu_seqlens_q is not None
    batch = call.tensors.cu_seqlens_q.shape[0] - 1
    return {
        "num_tiles": max_blocks(tokens, block_m, batch) * heads,
        "num_blocks": 0,
        "total_heads": 0,
        "l2_swizzle": 0,
        "batch": batch,
        "seqlen_q": tokens,
        "seqlen_k": room_for_keys(call),
    }


def max_blocks(tokens: int, block: int, batch: int) -> int:
    """Upper bound of the blocks of packed sequences.

    Each sequence begins with a block of its own, and tokens outside all sequences count as one more sequence.
    """
    return tokens // block + batch + 1


def rest_of_waves(tiles: int, cores: int) -> int:
    """The tiles that are left after whole waves of them; 0 where there is no whole wave."""
    return tiles % cores if tiles > cores else 0


def query_group(call: Call) -> int:
    """Query heads for each key head."""
    k = call.tensors.k
    return call.tensors.q.shape[1] // (k.shape[2] if call.layout == "paged" else k.shape[1])


def room_for_keys(call: Call) -> int:
    """Keys of each dense sequence, tokens of packed ones, or the keys that the pages of a sequence have room for."""
    t = call.tensors
    if t.page_table is not None:
        return t.page_table.shape[1] * t.k.shape[1]
    return t.k.shape[2 if t.cu_seqlens_q is None else 0]
