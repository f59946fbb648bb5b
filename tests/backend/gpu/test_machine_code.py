"""Loops of machine code, as `offline.loops` reads them."""

from offline.loops import Loops, loops_of, product_loops

SASS = """
.L_x_0:
 STL [R1], R2 ;
.L_x_1:
 HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
 LDL R2, [R1] ;
 @P0 BRA `(.L_x_1) ;
.L_x_2:
 HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
.L_x_3:
 SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R3] ;
 @!P1 BRA `(.L_x_3) ;
 STL [R1], R4 ;
 @P2 BRA `(.L_x_2) ;
 @P3 BRA `(.L_x_0) ;
 EXIT ;
"""
AMD = """
.LBB0_1:
 v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
 scratch_load_dword v1, off, off
 s_cbranch_scc1 .LBB0_1
 scratch_store_dword off, v1, off
"""


def test_loops_that_multiply() -> None:
    """Spills between loops do not count, and loops that wait are part of the loop around them."""
    assert [len(loop) for loop in product_loops(SASS)] == [4, 7]
    assert loops_of(SASS) == Loops("HMMA.16816.F32.BF16", 2)
    assert loops_of(AMD) == Loops("v_mfma_f32_32x32x8_bf16", 1)
    assert loops_of(".L_x_0:\n LDL R2, [R1] ;\n BRA `(.L_x_0) ;") == Loops("", 0)
