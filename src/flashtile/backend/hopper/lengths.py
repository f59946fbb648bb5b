"""How many tiles of rows a call has, and in what order they are taken (`schedule.Work`)."""

from ...call.call import Call
from .tables import most_blocks

SECTION_BYTES = 16 * 2**20  # keys and values that the L2 cache keeps while others pass


def lengths_of(call: Call, block_m: int) -> dict[str, int]:
    """For a kernel whose tiles have `block_m` rows."""
    return dense_lengths(call, block_m) if call.tensors.cu_seqlens_q is None else packed_lengths(call, block_m)


def dense_lengths(call: Call, block_m: int) -> dict[str, int]:
    batch, heads, seqlen_q, _ = call.tensors.q.shape
    blocks = -(-seqlen_q // block_m)
    return {
        "num_tiles": blocks * heads * batch,
        "num_blocks": blocks,
        "all_heads": heads * batch,
        "section": section(call),
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_k": call.tensors.k.shape[2],
    }


def packed_lengths(call: Call, block_m: int) -> dict[str, int]:
    """Tokens; tiles as many as there can be, those of tokens that belong to no sequence included."""
    tokens, heads, _ = call.tensors.q.shape
    assert call.tensors.cu_seqlens_q is not None
    batch = call.tensors.cu_seqlens_q.shape[0] - 1
    return {
        "num_tiles": most_blocks(tokens, block_m, batch) * heads,
        "num_blocks": 0,
        "all_heads": 0,
        "section": 0,
        "batch": batch,
        "seqlen_q": tokens,
        "seqlen_k": call.tensors.k.shape[0],
    }


def section(call: Call) -> int:
    """Heads that are worked on together: where rows see different numbers of keys, as many as the L2 cache holds."""
    q, k, v = call.tensors.q, call.tensors.k, call.tensors.v
    group = q.shape[1] // k.shape[1]
    if call.settings.window.unlimited:
        return group
    of_one = k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
    return group * max(1, SECTION_BYTES // of_one)
