"""PTX instructions that Gluon has no function for."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def barrier_sync(barrier, threads):
    """Waits at a named barrier until so many threads have arrived, those who wait included."""
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
    """Arrives at a named barrier and goes on."""
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
    """Waits until what this warpgroup gave to the copy engine has arrived in memory, not only left."""
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
    """`n`, of which the compiler knows nothing: what follows from it is not computed ahead of a loop and kept."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_acquire(semaphore):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [semaphore.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )
