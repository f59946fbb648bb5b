"""PTX instructions that Gluon has no function for."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def barrier_sync(barrier, threads):
    """Wait at a named barrier until `threads` threads have arrived, the waiting ones included."""
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.b32 $0, $1;",
        "=r,r,r,~{memory}",
        [barrier, threads],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def barrier_arrive(barrier, threads):
    """Arrive at a named barrier without waiting."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.b32 $0, $1;",
        "=r,r,r,~{memory}",
        [barrier, threads],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_stores_complete():
    """Wait until this warp's TMA stores are visible in global memory, not only read from shared memory."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;",
        "=r,r",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def launch_dependents():
    """Let a kernel that is launched as this one's dependent begin where programs of this one leave room."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        "=r,r,~{memory}",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_prerequisites():
    """Wait until the kernel before this one is complete, if this one was launched as its dependent."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;",
        "=r,r,~{memory}",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def opaque(n):
    """Hide n from the optimizer, so that values derived from it are not hoisted out of the loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def opaque_real(x, BRANCH: gl.constexpr):
    """Hide x from the optimizer. Alternative branches, 0, 1 and 2 or 0 and 3, have different constraints, or LLVM would
    compute before them what they have in common.
    """
    constraints: gl.constexpr = ("=f,f", "=f,0", "=&f,f", "=f,0")[BRANCH]
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", constraints, [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def lane_id():
    """A thread's place in its warp: a scalar that differs between threads."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %laneid; // $1", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def from_lane(x, lane):
    """The scalar x of one thread of the warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [x, lane], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def load_acquire(semaphore):
    """Load a semaphore with acquire semantics."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [semaphore.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def add_in_fours(pointers, x):
    """Add an accumulator in the order of `swizzle.swizzled` to memory, in fp32. Of eight registers of a thread, 0, 1,
    4, 5 and 2, 3, 6, 7 are adjacent elements, of which the first one is aligned to 16 bytes.
    """
    gl.inline_asm_elementwise(
        """red.relaxed.gpu.global.add.v4.f32 [$8], {$16, $17, $20, $21};
        red.relaxed.gpu.global.add.v4.f32 [$10], {$18, $19, $22, $23};
        mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
        mov.b32 $4, 0; mov.b32 $5, 0; mov.b32 $6, 0; mov.b32 $7, 0;""",
        "=r,=r,=r,=r,=r,=r,=r,=r,l,l,l,l,l,l,l,l,f,f,f,f,f,f,f,f",
        [pointers.to(gl.int64), x],
        dtype=gl.int32,
        is_pure=False,
        pack=8,
    )


@gluon.jit
def add_adjacent(t, pointers):
    """Add elements in memory to `t [M, N]` in the layout of scores. A thread's two adjacent columns are adjacent in
    memory and read at once; addresses of even columns are multiples of two elements.

    Loads and sums are one piece of assembly: LLVM would merge the sums with those of another branch, and hold all
    elements in registers until then.
    """
    dtype: gl.constexpr = pointers.dtype.element_ty
    if dtype == gl.bfloat16:
        asm: gl.constexpr = """{ .reg .b32 x, y; ld.global.b32 y, [$4]; shl.b32 x, y, 16; and.b32 y, y, 0xffff0000;
            add.f32 $0, $2, x; add.f32 $1, $3, y; }"""
    elif dtype == gl.float16:
        asm: gl.constexpr = """{ .reg .b16 a, b; .reg .b32 x, y; ld.global.v2.b16 {a, b}, [$4]; cvt.f32.f16 x, a;
            cvt.f32.f16 y, b; add.f32 $0, $2, x; add.f32 $1, $3, y; }"""
    else:
        asm: gl.constexpr = (
            """{ .reg .b32 x, y; ld.global.v2.b32 {x, y}, [$4]; add.f32 $0, $2, x; add.f32 $1, $3, y; }"""
        )
    return gl.inline_asm_elementwise(
        asm, "=r,=r,r,r,l,l", [t, pointers.to(gl.int64)], dtype=gl.float32, is_pure=False, pack=2
    )


@gluon.jit
def hide_adjacent(t, pointers):
    """`t [M, N]` where bytes in memory are not 0, else -inf; addresses as for `add_adjacent`."""
    return gl.inline_asm_elementwise(
        """{ .reg .pred p, q; .reg .b32 x, y; ld.global.u16 y, [$4]; and.b32 x, y, 255; setp.ne.u32 p, x, 0;
            setp.gt.u32 q, y, 255; selp.f32 $0, $2, 0fFF800000, p; selp.f32 $1, $3, 0fFF800000, q; }""",
        "=r,=r,r,r,l,l",
        [t, pointers.to(gl.int64)],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )
