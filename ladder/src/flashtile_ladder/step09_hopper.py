"""Step 9, last. Hopper's own instructions, in Gluon: a warp that only loads, and products of 64 x 128 x 128 numbers.

The change, from the kernel of mma.sync before.

- The copy engine (TMA) moves a whole tile for one instruction of one thread, swizzles it on the way, and fills with
  zeros what lies beyond N. No thread computes addresses, and no register holds what is on its way.
- A product of 64 rows is one instruction of 128 threads, a warpgroup (wgmma), which reads K and V from shared memory
  by itself and returns before it is done.
- Three roles in place of one. A warp loads; two warpgroups of 64 rows each multiply. They meet at barriers in shared
  memory (mbarriers), two for each buffer: `full`, which the copy engine completes when the last byte is there, and
  `empty`, at which a warpgroup arrives when it has read the buffer. The role is chosen once, so the loading warp gives
  its registers (24 stay) to those who hold S and the accumulator (240).
- S of one block and P V of the block before are in flight together, and the softmax runs while P V does.

Why it is faster. mma.sync needs its operands in registers and stops its warp: on an H200 the kernel before reaches 19%
of the chip's rate, and this one 72%. Neither loads nor the softmax leave the tensor cores without work for long.

Keys go from the last block to the first: the one block that needs a mask (the end of the keys, or the diagonal) is the
first, before the loop, and the loop has no mask. The phase of a barrier is the parity of its uses: buffer `j % STAGES`
is in use number `j // STAGES` when block j is in it.

Limits: float16 and bfloat16; d 64 or 128; one N for q, k and v; scale above 0; forward only; Hopper (sm_90) alone.
"""
# pyright: reportInvalidTypeForm=false

import math

import torch
from torch import Tensor

from ._host.gluon_or_not import TensorDescriptor, check_hopper, gl, gluon, hopper, tma_load, tma_store
from ._host.triton_or_not import on

BLOCK_M, BLOCK_N, STAGES = 128, 128, 2
LOG2_E = 1.4426950408889634


@gluon.jit
def kernel(
    q_desc, k_desc, v_desc, o_desc, LSE, N, scale_log2, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """Programs of 128 rows of a head. Boxes: q and out [1, 64, D], k and v [1, BLOCK_N, D], of [heads, N, D]."""
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[1]
    q = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 64, D], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BLOCK_N, D], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, BLOCK_N, D], v_desc.layout)
    q_full, k_full, v_full = barriers(2, 1), barriers(STAGES, 1), barriers(STAGES, 1)
    k_empty, v_empty = barriers(STAGES, 2), barriers(STAGES, 2)  # both warpgroups arrive
    hopper.fence_async_shared()  # the copy engine sees the barriers
    tiles = gl.cdiv(N, 128)
    head = gl.program_id(0) // tiles
    first_row = (tiles - 1 - gl.program_id(0) % tiles) * 128  # with causal, rows with most keys first
    keys = gl.minimum(first_row + 128, N) if CAUSAL else N
    blocks = gl.cdiv(keys, BLOCK_N)
    gl.warp_specialize(
        [
            (warpgroup, (0, q, k, v, q_full, k_full, v_full, k_empty, v_empty, o_desc, LSE, N, scale_log2, head,
                         first_row, blocks, CAUSAL)),
            (warpgroup, (1, q, k, v, q_full, k_full, v_full, k_empty, v_empty, o_desc, LSE, N, scale_log2, head,
                         first_row, blocks, CAUSAL)),
            (loads, (q, k, v, q_full, k_full, v_full, k_empty, v_empty, q_desc, k_desc, v_desc, head, first_row,
                     blocks)),
        ],
        [4, 1],  # warps and registers of all but the first, which has the rest
        [240, 24],
    )  # fmt: skip


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """[COUNT, 1] barriers; a phase of one is over after ARRIVALS arrivals and all announced bytes."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        hopper.mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def loads(
    q, k, v, q_full, k_full, v_full, k_empty, v_empty, q_desc, k_desc, v_desc, head, first_row, blocks
):  # fmt: skip
    """The warp that loads: it announces bytes to a barrier, and the copy engine takes them off."""
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[1]
    STAGES: gl.constexpr = k.shape[0]
    for w in gl.static_range(2):
        hopper.mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
        tma_load(q_desc, [head, first_row + 64 * w, 0], q_full.index(w), q.index(w))
    for j in range(blocks):
        stage, phase, key = j % STAGES, j // STAGES & 1, (blocks - 1 - j) * BLOCK_N
        hopper.mbarrier.wait(k_empty.index(stage), phase ^ 1)  # passes at once the first time
        hopper.mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        tma_load(k_desc, [head, key, 0], k_full.index(stage), k.index(stage))
        hopper.mbarrier.wait(v_empty.index(stage), phase ^ 1)
        hopper.mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        tma_load(v_desc, [head, key, 0], v_full.index(stage), v.index(stage))


@gluon.jit
def warpgroup(
    w: gl.constexpr, q, k, v, q_full, k_full, v_full, k_empty, v_empty, o_desc, LSE, N, scale_log2, head, first_row,
    blocks, CAUSAL: gl.constexpr,
):  # fmt: skip
    """64 rows. Layouts say which thread holds which number: S and the accumulator as wgmma leaves them."""
    D: gl.constexpr = q.shape[3]
    STAGES: gl.constexpr = k.shape[0]
    BLOCK_N: gl.constexpr = k.shape[2]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)  # in registers, where S was: no shared memory
    ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    rows = first_row + 64 * w + gl.arange(0, 64, gl.SliceLayout(1, S))  # [64]
    cols = (blocks - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))  # [BLOCK_N]
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S)
    acc = gl.zeros([64, D], gl.float32, ACC)
    q_w = q.index(w).reshape([64, D])
    hopper.mbarrier.wait(q_full.index(w), 0)
    hopper.mbarrier.wait(k_full.index(0), 0)
    s = hopper.warpgroup_mma(q_w, k.index(0).reshape([BLOCK_N, D]).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    hopper.mbarrier.arrive(k_empty.index(0), count=1)
    seen = gl.expand_dims(cols, 0) < N
    if CAUSAL:
        seen = seen & (gl.expand_dims(cols, 0) <= gl.expand_dims(rows, 1))
    s = gl.where(seen, s, float("-inf"))
    m = gl.max(s, 1) * scale_log2  # [64]
    p = gl.exp2(s * scale_log2 - gl.expand_dims(m, 1))  # [64, BLOCK_N]
    l = gl.sum(p, 1)  # [64]
    p = gl.convert_layout(p.to(k.dtype), P)
    for j in range(1, blocks):
        stage, before = j % STAGES, (j - 1) % STAGES
        hopper.mbarrier.wait(k_full.index(stage), j // STAGES & 1)
        k_j = k.index(stage).reshape([BLOCK_N, D]).permute((1, 0))
        s = hopper.warpgroup_mma(q_w, k_j, zeros, use_acc=False, is_async=True)  # begins S of block j ...
        hopper.mbarrier.wait(v_full.index(before), (j - 1) // STAGES & 1)
        acc = hopper.warpgroup_mma(p, v.index(before).reshape([BLOCK_N, D]), acc, is_async=True)  # ... and P V before
        s = hopper.warpgroup_mma_wait(1, deps=(s,))  # S is done, P V may still run
        hopper.mbarrier.arrive(k_empty.index(stage), count=1)
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
        alpha = gl.exp2(m - m_new)
        p_new = gl.exp2(s * scale_log2 - gl.expand_dims(m_new, 1))
        l = l * alpha + gl.sum(p_new, 1)
        m = m_new
        acc, p_new, l = hopper.warpgroup_mma_wait(0, deps=(acc, p_new, l))  # named, so that they come before the wait
        hopper.mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, ROWS), 1)
        p = gl.convert_layout(p_new.to(k.dtype), P)
    last = (blocks - 1) % STAGES
    hopper.mbarrier.wait(v_full.index(last), (blocks - 1) // STAGES & 1)
    acc = hopper.warpgroup_mma(p, v.index(last).reshape([BLOCK_N, D]), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    gl.store(LSE + head * N + rows, (m + gl.log2(l)) * 0.6931471805599453, mask=rows < N)
    out = acc / gl.expand_dims(gl.convert_layout(l, ROWS), 1)
    q_w.store(out.to(k.dtype))  # q has been read for the last time
    hopper.fence_async_shared()
    tma_store(o_desc, [head, first_row + 64 * w, 0], q.index(w))
    hopper.tma.store_wait(0)


# Host code: skip it when you learn.
def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`[N, d]` to out `[N, d]` in q's dtype and lse `[N]` in float32; or `[B, heads, N, d]` to lse `[B, heads, N]`.

    Raises:
        TritonUnavailableError: there is no Hopper GPU, or no Triton.
        ValueError: a shape, dtype or scale outside the limits above.
    """
    n, d = q.shape[-2:]
    scale = 1 / math.sqrt(d) if scale is None else scale
    check_hopper(q, k, v, scale)
    out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(q.shape[:-1], device=q.device)
    q, k, v, o = (x.contiguous().view(-1, n, d) for x in (q, k, v, out))
    layout = gl.NVMMASharedLayout.get_default_for([1, 64, d], gl.float16)
    boxes = [
        TensorDescriptor.from_tensor(x, [1, rows, d], layout)
        for x, rows in ((q, 64), (k, BLOCK_N), (v, BLOCK_N), (o, 64))
    ]
    grid = (q.shape[0] * ((n + BLOCK_M - 1) // BLOCK_M),)
    with on(q.device):
        kernel[grid](*boxes, lse, n, scale * LOG2_E, d, STAGES, causal, num_warps=4)
    return out, lse
