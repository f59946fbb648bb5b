"""The IO model against what the ladder's code reads and writes, and what torch's allocator gives out."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile_ladder import iomodel, step04_standard, step05_flash1, step06_flash2
from flashtile_ladder.cli.allocation import live_and_peak_bytes
from flashtile_ladder.iomodel import Machine, Shape, Work
from flashtile_ladder.measure.counted import count

N, D = 200, 16
MEMORY = 4 * 48 * D  # elements on chip: tiles of 16 rows and 48 keys, the last key block partial
TILES = {"block_m": 32, "block_n": 24}


def expect(counts: dict[str, int], work: Work) -> None:
    assert counts == {"read": work.read, "written": work.written}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
class TestTraffic:
    """Bytes predicted are the bytes that the steps' own slices move, and the counted run computes attention."""

    def shape(self, causal: bool, dtype: torch.dtype) -> Shape:
        return Shape.square(N, D, causal=causal, itemsize=dtype.itemsize)

    def inputs(self, causal: bool, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor]:
        q, k, v, dout = (torch.randn(N, D, dtype=dtype) for _ in range(4))
        out, lse, p = step04_standard.attention_in_kernels(q, k, v, causal)
        return [q, k, v], [out, lse, dout], p

    def check(
        self, work: Work, function: Callable[..., Any], causal: bool, dtype: torch.dtype, **keywords: Any
    ) -> None:
        qkv, saved, p = self.inputs(causal, dtype)
        if function.__name__ == "backward":
            right = step04_standard.backward(*qkv, *saved, causal, p=p)
            kept = {"p": p} if function is step04_standard.backward else {}
            counts, results = count(function, qkv + saved, causal, **kept, **keywords)
        else:
            right = saved[:2]
            counts, results = count(function, qkv, causal, **keywords)
        expect(counts, work)
        for got, want in zip(results, right, strict=False):
            torch.testing.assert_close(got, want)

    def test_standard_forward(self, causal: bool, dtype: torch.dtype) -> None:
        work = iomodel.standard_forward(self.shape(causal, dtype))
        self.check(work, step04_standard.attention_in_kernels, causal, dtype)

    def test_standard_backward(self, causal: bool, dtype: torch.dtype) -> None:
        self.check(iomodel.standard_backward(self.shape(causal, dtype)), step04_standard.backward, causal, dtype)

    @pytest.mark.parametrize("name", ["attention", "backward"])
    def test_flash1(self, name: str, causal: bool, dtype: torch.dtype) -> None:
        model = iomodel.flash1_forward if name == "attention" else iomodel.flash1_backward
        work = model(self.shape(causal, dtype), MEMORY * dtype.itemsize)
        self.check(work, getattr(step05_flash1, name), causal, dtype, memory=MEMORY)

    @pytest.mark.parametrize("name", ["attention", "backward"])
    def test_flash2(self, name: str, causal: bool, dtype: torch.dtype) -> None:
        model = iomodel.flash2_forward if name == "attention" else iomodel.flash2_backward
        self.check(model(self.shape(causal, dtype), **TILES), getattr(step06_flash2, name), causal, dtype, **TILES)


# Peak memory ---------------------------------------------------------------------------------------------------------


def beyond_results(run: Callable[[], Any]) -> int:
    """The least of two runs: what other tests of this process have left may be freed during one of them."""
    return min(peak - live for live, peak in (live_and_peak_bytes(run) for _ in range(2)))


def near(predicted: int, within: float = 0.1) -> Any:
    return pytest.approx(predicted, rel=within)


@pytest.mark.parametrize("causal", [False, True])
def test_peak_of_the_steps(causal: bool) -> None:
    n, d = 512, 64
    shape = Shape.square(n, d, causal=causal)
    q, k, v, dout = (torch.randn(n, d) for _ in range(4))
    assert beyond_results(lambda: step04_standard.attention(q, k, v, causal)) == near(
        iomodel.standard_forward(shape).peak, 0.01
    )
    block_m, block_n = step05_flash1.block_sizes(step05_flash1.M, d)
    row_numbers = 4 * n
    for step, forward, backward, tile, rows in (
        (step05_flash1, iomodel.FLASH1_FORWARD, iomodel.FLASH1_BACKWARD, (block_m, block_n), (2, 0)),  # l, m
        (step06_flash2, iomodel.FLASH2_FORWARD, iomodel.FLASH2_BACKWARD, (128, 128), (0, 1)),  # delta
    ):
        out, lse = step.attention(q, k, v, causal)
        found = beyond_results(lambda: step.attention(q, k, v, causal))  # noqa: B023
        assert found == near(iomodel.blocks_peak(forward, shape, *tile) + rows[0] * row_numbers)
        found = beyond_results(lambda: step.backward(q, k, v, out, lse, dout, causal))  # noqa: B023
        assert found == near(iomodel.blocks_peak(backward, shape, *tile) + rows[1] * row_numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads_q", "heads_kv", "causal"), [(1, 1, False), (4, 2, True)])
def test_peak_of_the_tiled_backend(dtype: torch.dtype, heads_q: int, heads_kv: int, causal: bool) -> None:
    """Grouped heads, both directions, with the tile of the plan."""
    n, d = 1024, 64
    q = torch.randn(1, heads_q, n, d, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(1, heads_kv, n, d, dtype=dtype, requires_grad=True) for _ in range(2))
    shape = Shape(n, n, d, d, 1, heads_q, heads_kv, causal, dtype.itemsize)
    words = flashtile.explain(q, k, v, causal=causal, backend="tiled").tile
    tile = [int(word.split()[-1]) for word in words.split(", ")]
    inputs = [x.detach() for x in (q, k, v)]
    found = beyond_results(lambda: flashtile.attention(*inputs, causal=causal, return_lse=True, backend="tiled"))
    assert found == near(iomodel.tiled_forward(shape, *tile).peak)
    out = flashtile.attention(q, k, v, causal=causal, backend="tiled")
    dout = torch.randn_like(out)
    found = beyond_results(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    assert found == near(iomodel.tiled_backward(shape, *tile).peak)


# Formulas ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "standard", "fused"), [(1024, 15.4, 261), (4096, 16.1, 1044)])
def test_published_intensities(n: int, standard: float, fused: float) -> None:
    """float32, d = 64, five operations of softmax for each score; fused with every matrix moved once."""
    shape = Shape.square(n, 64)
    assert iomodel.standard_forward(shape).intensity == pytest.approx(standard, rel=0.005)
    assert iomodel.flash2_forward(shape, block_m=n, block_n=n).intensity == pytest.approx(fused, rel=0.005)


def test_flash1_is_quadratic_over_memory() -> None:
    """Theta(N² d² / M): doubling M halves the traffic, doubling N quadruples it, within what is linear in N."""
    n, d, memory = 16384, 64, 96 * 1024
    moved = iomodel.flash1_forward(Shape.square(n, d), memory).moved
    assert iomodel.flash1_forward(Shape.square(n, d), 2 * memory).moved == pytest.approx(moved / 2, rel=0.02)
    assert iomodel.flash1_forward(Shape.square(2 * n, d), memory).moved == pytest.approx(4 * moved, rel=0.02)
    assert iomodel.flash1_backward(Shape.square(2 * n, d), memory).moved == pytest.approx(
        4 * iomodel.flash1_backward(Shape.square(n, d), memory).moved, rel=0.02
    )
    constant = moved / 4 * (memory / 4) / (n * d) ** 2  # elements
    assert constant == pytest.approx(12, rel=0.05)  # 4 N d / M key blocks, each 3 N d elements of Q and O


def test_block_sizes() -> None:
    """Algorithm 1, line 1; the ladder, which imports nothing, has the same line."""
    for name, d in (("A100", 64), ("H200", 128), ("H100", 80)):
        memory = iomodel.ON_CHIP_BYTES[name]
        rows, keys = iomodel.block_sizes(memory, d)
        assert (rows, keys) == step05_flash1.block_sizes(memory // 4, d)
        assert keys == math.ceil(memory / 4 / (4 * d))
        assert rows == min(keys, d)
    assert iomodel.block_sizes(iomodel.ON_CHIP_BYTES["A100"], 64) == (64, 192)
    assert iomodel.block_sizes(192 * 1024, 64, itemsize=2) == (64, 384)
    l2 = iomodel.cpu_l2_bytes()
    assert l2 is None or 2**15 < l2 < 2**30


def test_decode_reads_the_cache_once() -> None:
    """For all query heads of a group, and once more nothing but the parts of a split."""
    shape = Shape(1, 8192, 128, 128, batch=4, num_heads_q=32, num_heads_kv=8, itemsize=2)
    cache = 4 * 8 * 8192 * (128 + 128) * 2
    whole, split = iomodel.decode(shape), iomodel.decode(shape, num_splits=4)
    assert whole.read == cache + 4 * 32 * 128 * 2
    assert whole.flops == 4 * 4 * 32 * 8192 * 128
    parts = 4 * 32 * 4 * (128 + 1) * 4
    assert split.written - whole.written == parts == split.peak
    assert split.read - whole.read == parts + 3 * 4 * 32 * 128 * 2
    assert whole.intensity == pytest.approx(
        4, rel=0.05
    )  # 4 heads share what they read: 2 operations for each byte each


def test_tiled_moves_what_its_tiles_say() -> None:
    """One tile: q, k, v once, results filled and stored. Twice the row blocks read k and v twice; causal less."""
    shape = Shape.square(1024, 64)
    one = iomodel.tiled_forward(shape, 1024, 1024)
    assert one.read == 3 * 1024 * 64 * 4
    assert one.written == 2 * 1024 * 65 * 4
    assert iomodel.tiled_forward(shape, 512, 1024).read - one.read == 2 * 1024 * 64 * 4
    causal = iomodel.tiled_forward(Shape.square(1024, 64, causal=True), 512, 256)
    assert causal.read == (1024 + 2 * (512 + 1024)) * 64 * 4
    both = iomodel.tiled_backward(shape, 1024, 1024)
    assert both.read == (3 * 64 + 1 + 4 * 64) * 1024 * 4  # q out dout, lse; k v dk dv
    assert both.written == (64 + 2 * 64 + 3 * 64) * 1024 * 4  # dq, dk dv, and all filled


def test_roofline() -> None:
    machine = Machine(flops_per_second=1000.0, bytes_per_second=10.0)
    assert machine.ridge == 100
    assert iomodel.roofline(5000, 10, machine) == ("compute", 5.0)
    assert iomodel.roofline(5000, 100, machine) == ("memory", 10.0)
    assert iomodel.roofline(1000, 10, machine).seconds == 1.0


def test_causal_pairs() -> None:
    assert Shape.square(5, 8, causal=True).pairs == 15
    assert Shape(2, 5, 8, 8, 3, 2, 1, causal=True).pairs == 6 * (4 + 5)
    assert Shape(5, 2, 8, 8, causal=True).pairs == 1 + 2
