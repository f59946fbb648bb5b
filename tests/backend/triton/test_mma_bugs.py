"""Mistakes planted in the kernels of mma.sync, which their emulation has to find."""

from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("triton.experimental.gluon")

from gluon_emulation.machine import EmulationError
from gluon_emulation.mma_backend import copy_with_mistake
from mma_cases import BOTH, SMALL, SMALL_TWO, WIDE_BOTH, WIDE_TILES, made, wide, wrong

from flashtile.backend.triton.tile_config import TileConfig

pytestmark = pytest.mark.usefixtures("one_thread")


class Bug(NamedTuple):
    """A mistake in a kernel, and the problem on which the emulation has to notice it."""

    name: str
    file: str
    old: str
    new: str
    problem: str = "causal"
    tile: TileConfig = SMALL_TWO
    wide: bool = False  # of the forward kernel of wide heads


FORWARD, BACKWARD, TILING, FROM_SUMS = (f"kernels/mma/{x}.py" for x in ("forward", "backward", "tiles", "from_sums"))
WIDE, (FOUR, THREE, _) = "kernels/mma/wide_forward.py", WIDE_TILES
WAIT = "async_copy.wait_group"
COPY_K = "            if n + 1 < count:\n                copy_rows(buffers.k.index(1"
COPY_V = "            if n + 1 < count:\n                copy_rows(buffers.v"
COPY_K_AGAIN = "            if n + 1 < count:\n                copy_rows(buffers.k.index(0"
ADD_DK = "        dk_j = add_product(dk_j, buffers.ds, q_s, D)\n"
LOAD_Q = "        if not TWO:\n"
LOAD_Q += "            if n + 1 < count:\n                load_q(buffers, rows, then, 0, LAYOUTS, CONFIG)\n"
SHOWN_P = " bounds, keys, exists, row, params, info, CONFIG)\n        buffers.p"
OF_COPY = "(row < seqlen)[:, None]"
FEATURES = " & (d < D.WIDTH)[None, :]\n    begin_copy"
BUGS = (
    Bug("no wait for keys", FORWARD, f"            {WAIT}(1)\n{COPY_K}", COPY_K),
    Bug("no wait for values", FORWARD, f"            {WAIT}(1)\n{COPY_V}", COPY_V),
    Bug("no wait for rows", BACKWARD, f"        {WAIT}(0)\n        if TWO:", "        if TWO:"),
    Bug(
        "wait for all values but the last", FORWARD, f"            {WAIT}(0)\n{COPY_K_AGAIN}",
        f"            {WAIT}(1)\n{COPY_K_AGAIN}", tile=SMALL,
    ),
    Bug("q in flight at the end", FORWARD, f"        {WAIT}(0)  # rows", "        # rows", "packed"),
    Bug("keys in flight at the end", BACKWARD, f"        {WAIT}(0)  # keys", "        # keys", "packed"),
    Bug("keys of the other stage", FORWARD, "buffers.k.index(stage), D,", "buffers.k.index(1 - stage), D,"),
    Bug("values of the first stage", FORWARD, "p, buffers.v.index(stage), DV)", "p, buffers.v.index(0), DV)"),
    Bug("rows of the first stage", BACKWARD, "dout_s = buffers.q.index(stage)", "dout_s = buffers.q.index(0)"),
    Bug("rows loaded while they are used", BACKWARD, ADD_DK + LOAD_Q, LOAD_Q + ADD_DK, tile=SMALL),
    Bug("scores at the diagonal not masked", FORWARD, "        if at.masked:\n", "        if at.masked & False:\n"),
    Bug("pairs at the diagonal not masked", BACKWARD, "        if masked:\n", "        if masked & False:\n"),
    Bug(
        "keys that do not exist not masked", BACKWARD, f"at.masked | cut,{SHOWN_P}", f"at.masked,{SHOWN_P}",
        "packed, some rows in use",
    ),
    Bug("edge at the left not masked", TILING, "(start < blocks.full_lo) | ", "", "window"),
    Bug("first row of packed sums", FROM_SUMS, "(offset // M + sequence)", "(offset // M)", "packed"),
    Bug("sums in another order of lanes", FROM_SUMS, "d % 2 * 32 + row % 8 * 4", "d % 2 * 4 + row % 8 * 8"),
    Bug("sums of the second chunk", BACKWARD, "to + 8 * D.CHUNK_0", "to + D.CHUNK_0", "head dim 96"),
    Bug("acc not rescaled", FORWARD, "add_weighted(acc.a * alpha", "add_weighted(acc.a"),
    Bug("sink lost", FORWARD, "m = gl.maximum(m, sink)", "m = m * 0 + sink", "sinks"),
    Bug("statistics of natural scores", BACKWARD, "(2 * row if CONFIG.NATURAL else row)", "row", "bias"),
    Bug("features past the last one", TILING, OF_COPY + FEATURES, OF_COPY + "\n    begin_copy", "head dim 24"),
    *(
        Bug(f"wide heads: {name}", WIDE, old, new, problem, tile, wide=True)
        for name, old, new, problem, tile in (
            ("no wait for chunks", f"    {WAIT}(CONFIG.STAGES - 2)\n", "", "causal", FOUR),
            ("a wait for fewer chunks", f"{WAIT}(CONFIG.STAGES - 2)", f"{WAIT}(CONFIG.STAGES - 1)", "causal", FOUR),
            ("a slot that is still read", "free = ring[AHEAD %", "free = ring[CHUNK %", "bias", FOUR),
            ("first chunk of q", "buffers.q.index(c), chunk", "buffers.q.index(0), chunk", "causal", FOUR),
            ("first chunk of sums", "state.acc[c] * alpha", "state.acc[0] * alpha", "causal", FOUR),
            ("sums not rescaled", "state.acc[c] * alpha[:, None]", "state.acc[c]", "causal", FOUR),
            ("more steps than slots", "// STAGES) * STAGES", "// STAGES) * STAGES + 1", "causal", THREE),
            ("keys that do not exist", f"slot, pointers, mask={OF_COPY}", "slot, pointers, mask=row[:, None] >= 0",
             "bias", FOUR),
            ("features past the last", f"slot, pointers, mask={OF_COPY} & (d < D.WIDTH)[None, :]",
             f"slot, pointers, mask={OF_COPY}", "softcap", FOUR),
            ("q in flight at the end", f"        {WAIT}(0)  # rows", "        # rows", "no keys", FOUR),
            ("the same block again", "keys, then.start", "keys, at.start", "bias", FOUR),
        )
    ),
)  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_bug_is_caught(bug: Bug, tmp_path: Path) -> None:
    folder = tmp_path / f"bug{BUGS.index(bug)}"
    copy_with_mistake(folder, bug.file, bug.name, bug.old, bug.new)
    try:
        case, kernels = (wide(bug.problem), WIDE_BOTH) if bug.wide else (made(bug.problem), BOTH)
        found = wrong(case, bug.tile, folder=folder, kernels=kernels)
    except EmulationError:
        return
    assert found != []
