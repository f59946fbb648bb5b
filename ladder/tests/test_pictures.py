"""Pictures are what their program draws, and true; the page of the tile loop counts the bytes that the steps do."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ladder_cases import needs_compiler

from flashtile_ladder import step05_flash1, step06_flash2
from flashtile_ladder._host import emulation
from flashtile_ladder.measure.counted import count

DOCS = Path(__file__).parents[1] / "docs"
sys.path.append(str(DOCS))
import make_pictures as pictures  # noqa: E402

PAGE = (DOCS / "tile-loop.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_current(name: str) -> None:
    assert (DOCS / f"{name}.svg").read_text(encoding="utf-8") == pictures.PICTURES[name](), "run docs/make_pictures.py"


KERNEL = """
typedef unsigned short half_bits;
extern "C" __global__ void multiply(const half_bits* a, const half_bits* b, float* c) {
    const int lane = threadIdx.x;
    unsigned x[4], y[2];
    for (int i = 0; i < 4; i++) x[i] = a[8 * lane + 2 * i] | a[8 * lane + 2 * i + 1] << 16;
    for (int i = 0; i < 2; i++) y[i] = b[4 * lane + 2 * i] | b[4 * lane + 2 * i + 1] << 16;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    multiply_add(sums, x, y[0], y[1]);
    for (int i = 0; i < 4; i++) c[4 * lane + i] = sums[i];
}
"""


@needs_compiler
def test_lanes_hold_what_the_picture_says() -> None:
    """A and B are handed out to the lanes by the picture's formulas, and C is collected by them: it is A B."""
    a, b = torch.randn(16, 16).half(), torch.randn(16, 8).half()
    parts_a, parts_b, parts_c = torch.zeros(32, 4, 2).half(), torch.zeros(32, 2, 2).half(), torch.zeros(32, 4)
    for row in range(16):
        for column in range(16):
            lane, register = pictures.owner_of_a(row, column)
            parts_a[lane, register, column % 2] = a[row, column]
        for column in range(8):
            lane, register = pictures.owner_of_b(row, column)
            parts_b[lane, register, row % 2] = b[row, column]
    emulation.run(KERNEL, "multiply", (1, 1), (32, 1), parts_a, parts_b, parts_c, HALF="f16")
    found = torch.tensor([[float(parts_c[pictures.owner_of_c(i, j)]) for j in range(8)] for i in range(16)])
    torch.testing.assert_close(found, a.float() @ b.float())


def test_a_second_buffer_saves_time() -> None:
    """No span overlaps another of its lane, and each tile has its five spans."""
    for stages in (1, 2):
        spans = pictures.schedule(stages, 3)
        assert sorted(span.words for span in spans) == sorted(f"{x}{i}" for x in "KVSPO" for i in (1, 2, 3))
        for lane in {span.lane for span in spans}:
            own = [span for span in spans if span.lane == lane]
            assert all(a.end <= b.start for a, b in itertools.pairwise(own))
    assert max(x.end for x in pictures.schedule(2, 3)) < max(x.end for x in pictures.schedule(1, 3))


def test_the_page_needs_nothing_from_outside() -> None:
    """One file: no address, no other file, no module."""
    assert not re.search(r"https?://|<link|<iframe|<img|\bsrc=|@import|url\(|\bfetch\(|\bimport\b", PAGE)
    assert PAGE.count("<script>") == 1


def simulated(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the page's loops find for each of these settings: bytes at the end, the error, the tiles."""
    script = PAGE.partition("<script>")[2].partition("</script>")[0]
    script += f"\nconst calls = {json.dumps(calls)};"
    script += "\nconsole.log(JSON.stringify(calls.map(simulate).map(x => ({ last: x.states[x.states.length - 1],"
    script += " error: x.error, tiles: x.visited.length, standard: x.standard }))));"
    done = subprocess.run(["node", "-"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js")
def test_the_page_counts_what_the_steps_do() -> None:
    calls = [
        {"n": n, "memory": memory, "d": d, "order": order, "causal": causal}
        for n, memory, d in ((12, 64, 4), (7, 20, 3), (24, 256, 8), (2, 4, 1))
        for order in (1, 2)
        for causal in (False, True)
    ]
    for call, found in zip(calls, simulated(calls), strict=True):
        tensors, memory = [torch.randn(call["n"], call["d"]) for _ in range(3)], call["memory"]
        if call["order"] == 1:
            counts, _ = count(step05_flash1.attention, tensors, call["causal"], memory=memory)
        else:
            rows, keys = step05_flash1.block_sizes(memory, call["d"])
            counts, _ = count(step06_flash2.attention, tensors, call["causal"], block_m=rows, block_n=keys)
        assert {name: found["last"][name] for name in counts} == counts, call
        assert found["error"] < 1e-12, call
        n, d = call["n"], call["d"]
        assert sum(found["standard"].values()) == 4 * (4 * n * n + 4 * n * d)
