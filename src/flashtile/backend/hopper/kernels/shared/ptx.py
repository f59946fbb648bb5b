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
def opaque(n):
    """Hide n from the optimizer, so that values derived from it are not hoisted out of the loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def opaque_real(x, BRANCH: gl.constexpr):
    """Hide x from the optimizer. Of three branches, each has other constraints, or LLVM would compute before the
    branches what all have in common.
    """
    constraints: gl.constexpr = ("=f,f", "=f,0", "=&f,f")[BRANCH]
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", constraints, [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def load_acquire(semaphore):
    """Load a semaphore with acquire semantics."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [semaphore.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )
