"""The warpgroup that transposes values: products of 8 bits read their right operand along keys, memory has it along
features.

Two features of a key are one word of 16 bits, which `ldmatrix` transposes. A thread then holds the words of keys 2t, 2t
+ 1, 2t + 8 and 2t + 9 of every 16; bytes of equal features become a run of four keys. In this order of keys a thread
holds p as the scores' layout gives it, and p moves between no threads (`rounding`).
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..shared.compat import reinterpret_smem, thread_barrier
from ..shared.pipeline import as_matrix, consumer_release, consumer_wait, producer_acquire, stage_of
from ..shared.tile_scheduler import pop_tile


@gluon.jit
def transpose_warps(pipelines, queue, CONFIG: gl.constexpr):
    """The partition that transposes values."""
    STAGES: gl.constexpr = CONFIG.v_stages
    TRANSPOSED_STAGES: gl.constexpr = CONFIG.transposed_stages
    v, transposed = pipelines.v, pipelines.v_transposed
    tile_count = 0
    count = 0
    tile = pop_tile(queue, 0)
    while tile.b >= 0:
        for _ in range(tile.hi - tile.lo):
            consumer_wait(v, count, STAGES)
            producer_acquire(transposed.empty, count, TRANSPOSED_STAGES)
            source, target = (
                v.data[0].index(stage_of(count, STAGES)),
                transposed.data[0].index(stage_of(count, TRANSPOSED_STAGES)),
            )
            transpose_block(as_matrix(source), target, CONFIG)
            consumer_release(v.empty, count, STAGES)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(transposed.full.index(stage_of(count, TRANSPOSED_STAGES)), count=1)
            count += 1
        tile_count += 1
        tile = pop_tile(queue, tile_count)


@gluon.jit
def transpose_block(source, target, CONFIG: gl.constexpr):
    """Write `source [keys, features]` to `target [features, keys]`, some words at a time."""
    KEYS: gl.constexpr = CONFIG.block_n
    WIDTH: gl.constexpr = CONFIG.head_dim_v.width
    WORDS: gl.constexpr = CONFIG.transposed_words
    words = reinterpret_smem(source, gl.int16, [KEYS, WIDTH // 2], panel_layout(min(WIDTH, 128)))
    transposed = reinterpret_smem(target, gl.int16, [WIDTH, KEYS // 2], panel_layout(min(KEYS, 128)))
    layout: gl.constexpr = words_of_threads(KEYS, WORDS, CONFIG.transpose_warps)
    for first in gl.static_range(0, WIDTH // 2, WORDS):
        part = words if WORDS == WIDTH // 2 else words.slice(first, WORDS, dim=1)
        x = with_bytes_of_features(part.load(layout))
        # Octets of words: 16 keys, their half, a thread's place, a pair of keys; features.
        x = gl.permute(gl.reshape(x, [KEYS // 16, 2, 4, 2, WORDS]), [4, 1, 0, 2, 3])
        rows = transposed if WORDS == WIDTH // 2 else transposed.slice(2 * first, 2 * WORDS, dim=0)
        rows.store(gl.reshape(x, [2 * WORDS, KEYS // 2]))


@constexpr_function
def panel_layout(width):
    """Shared memory of `width` bytes a row in words of 16 bits."""
    return gl.NVMMASharedLayout(width, 16, 2)


@constexpr_function
def words_of_threads(keys, words, num_warps):
    """Layout of `[keys, words]` that `ldmatrix` gives when it transposes; a thread's first four words are two keys and
    those 8 further.
    """
    rest = [[n, 0] for n in powers(16, keys)] + [[0, n] for n in powers(8, words)]
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    of_warps = num_warps.bit_length() - 1
    registers = [[1, 0], [8, 0], *rest[of_warps:]]
    return gl.DistributedLinearLayout(registers, lanes, rest[:of_warps], [], [keys, words])


@constexpr_function
def powers(first, stop):
    return [1 << n for n in range(first.bit_length() - 1, stop.bit_length() - 1)]


@gluon.jit
def with_bytes_of_features(x):
    """Of each four words `[2 halves, 2 keys]` of two features each: `[2 features, 2 pairs of keys]`."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531; // with_bytes_of_features",
        "=&r,=r,r,r", [x], dtype=gl.int16, is_pure=True, pack=4,
    )  # fmt: skip
