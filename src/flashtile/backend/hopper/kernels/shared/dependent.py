"""Programmatic dependent launch in Triton's own language, as in `ptx`: a kernel begins while the one before it runs.

A kernel that is launched so reads what others wrote only behind `wait_prerequisites`, and each of its programs waits
before its end, so that whatever comes later in the stream finds all of these kernels complete. Triton's own functions
for it let the compiler move loads across them.
"""

import triton
import triton.language as tl

CONSTRAINTS = tl.constexpr("=r,r,~{memory}")


@triton.jit
def launch_dependents():
    """Let a kernel that is launched as this one's dependent begin where programs of this one leave room."""
    asm: tl.constexpr = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"
    tl.inline_asm_elementwise(asm, CONSTRAINTS, [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_prerequisites():
    """Wait until the kernel before this one is complete, if this one was launched as its dependent."""
    asm: tl.constexpr = "griddepcontrol.wait; mov.b32 $0, $1;"
    tl.inline_asm_elementwise(asm, CONSTRAINTS, [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)
