"""Arguments of the tile scheduler for tiles of rows (`kernels.shared.tile_scheduler`)."""

from ...call.call import Call
from ...call.device import describe_device
from .listed import has_lists
from .row_queue import RowQueue, key_steps
from .tables import max_blocks

L2_BYTES = 16 * 2**20  # of keys and values that stay in the L2 cache
MORE_L2_BYTES = 40 * 2**20  # at most, where a short queue of tiles then ends earlier
LISTED_WAVES = 4  # tiles for each program that heads with lists have together: the last ones differ in length
SIZES = 64  # of groups of heads that are compared


def scheduler_args(call: Call, block_m: int, block_n: int, programs_per_core: int = 1) -> dict[str, int]:
    """Scheduler arguments of a kernel whose tiles have `block_m` rows and visit blocks of `block_n` keys."""
    if call.tensors.cu_seqlens_q is not None:
        return packed_scheduler_args(call, block_m)
    return dense_scheduler_args(call, block_m, block_n, programs_per_core)


def dense_scheduler_args(call: Call, block_m: int, block_n: int, programs_per_core: int) -> dict[str, int]:
    batch, heads, seqlen_q, _ = call.tensors.q.shape
    blocks = -(-seqlen_q // block_m)
    return {
        "num_tiles": blocks * heads * batch,
        "num_blocks": blocks,
        "total_heads": heads * batch,
        "l2_swizzle": l2_swizzle(call, block_m, block_n, programs_per_core),
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


def l2_swizzle(call: Call, block_m: int, block_n: int, programs_per_core: int) -> int:
    """Query heads that are scheduled together.

    With a window, a diagonal or lists of blocks, as many as the L2 cache holds keys and values for, since their tiles
    see different keys, and numbers of them: tiles of a few heads alone would leave programs idle at the end. Where such
    heads do, larger groups may end earlier (`row_queue`). With lists, at least as many as fill the device some times:
    their order is not that of their lengths.
    """
    q, k, v = call.tensors.q, call.tensors.k, call.tensors.v
    group, seqlen_q, seqlen_k = query_group(call), q.shape[2], room_for_keys(call)
    if call.settings.window.unlimited and not has_lists(call):
        return group
    heads, bytes_per_head = q.shape[0] * q.shape[1] // group, seqlen_k * (k.shape[-1] + v.shape[-1]) * k.element_size()
    most = max(1, L2_BYTES // bytes_per_head)
    if has_lists(call):
        return group * equal_groups(heads, max(most, listed_heads(call, group * -(-seqlen_q // block_m))))
    few, programs = equal_groups(heads, most), describe_device(q.device).cores * programs_per_core
    if few == heads:
        return group * few
    steps = reversed(key_steps(call.settings, seqlen_q, seqlen_k, block_m, block_n))
    queue = RowQueue(heads, tuple(n for n in steps for _ in range(group)), programs)
    return group * queue.heads_at_once(few, MORE_L2_BYTES // bytes_per_head)


def listed_heads(call: Call, blocks: int) -> int:
    """Heads of `blocks` tiles each that fill the device LISTED_WAVES times."""
    return -(-LISTED_WAVES * describe_device(call.tensors.q.device).cores // blocks)


def equal_groups(heads: int, most: int) -> int:
    """Heads of each group, at most `most` and over half of them, so that the last group lacks the fewest: a few heads
    whose tiles begin when all others end would leave programs idle.
    """
    most = min(most, heads)
    return min(range(most, max(most // 2, most - SIZES), -1), key=lambda n: -(-heads // n) * n)


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
