"""What the ladder's pages on memory and rounding measure: the kernels do what is said, and the figures say what is."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ladder_cases import needs_compiler

from flashtile_ladder import iomodel, step04_standard
from flashtile_ladder._host import cuda_compile, cuda_launch
from flashtile_ladder._host.cuda_steps import warps
from flashtile_ladder._host.emulation import emulation
from flashtile_ladder.cli import dtypes, gpu, large, long, show
from flashtile_ladder.cli import rounding as ladder_rounding
from flashtile_ladder.cli.library import STEP
from flashtile_ladder.cli.measure import Measurement, Table
from flashtile_ladder.iomodel import Machine, Shape
from flashtile_ladder.measure import memory_levels, memory_patterns, rounding
from flashtile_ladder.related import shared_memory

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def finished(measurement: Measurement) -> Table:
    """The table, when it is measured."""
    while True:
        try:
            next(measurement)
        except StopIteration as done:
            return done.value


# Rounding ------------------------------------------------------------------------------------------------------------


def float32(*values: float) -> Any:
    return np.array(values, np.float32)


def test_a_fused_multiply_add_rounds_once() -> None:
    """(1 + e)(1 - e) - 1 = -e²: a product of its own rounds to 1, and nothing is left."""
    e = 2.0**-20
    factors = float32(1 + e), float32(1 - e), float32(-1)
    assert rounding.multiply_add(*factors, fused=True)[0] == -(e**2)
    assert rounding.multiply_add(*factors, fused=False)[0] == 0


def test_the_order_of_a_sum() -> None:
    """2^24 absorbs a 1 in float32, but not a 2."""
    ones = np.ones((4, 1), np.float32)
    for row, expected in (((2.0**24, 1, 1, 0), (0, 2, 2)), ((1, 1, 2.0**24, 0), (2, 0, 2))):
        found = [rounding.product(float32(*row)[None], ones, True, order)[0, 0] for order in rounding.ORDERS]
        assert tuple(x - 2.0**24 for x in found[:2]) == expected[:2]
    pairs = rounding.product(float32(2.0**24, 1, 1, 1)[None], ones, True, "pairs")[0, 0]
    assert pairs - 2.0**24 == 2


@pytest.mark.parametrize("keywords", [{}, *rounding.CHANGES.values()], ids=str)
def test_each_way_to_round_is_attention(keywords: dict[str, Any]) -> None:
    q, k, v = (torch.randn(50, 16) for _ in range(3))
    out, lse = rounding.attention(q.numpy(), k.numpy(), v.numpy(), 0.25, **keywords)
    expected = step04_standard.attention(q.double(), k.double(), v.double())
    for x, y in zip((out, lse), expected, strict=True):
        assert x.dtype == np.float32
        torch.testing.assert_close(torch.from_numpy(x).double(), y, rtol=0, atol=3e-6)


def test_the_table_of_rounding() -> None:
    """Everything moves the results, nothing by much; unscaled scores, which are larger, move further."""
    rows = finished(ladder_rounding.rounding(CPU)).rows
    for scale, most in ((64**-0.5, 3e-6), (1.0, 1e-4)):
        own = {row["change"]: row for row in rows if row["scale"] == scale}
        assert set(own) == {"none", *rounding.CHANGES}
        assert own.pop("none")["out_moves_by"] == 0
        assert all(0 < row["out_moves_by"] < most and 0 < row["lse_moves_by"] < most for row in own.values())
    assert max(row["out_moves_by"] for row in rows if row["scale"] == 1) > 3e-6
    assert all(row["out_error"] < 1e-4 for row in rows)


# Memory --------------------------------------------------------------------------------------------------------------


@needs_compiler
def test_columns_read_every_number_once() -> None:
    x = (2.0 ** torch.arange(16)).repeat(4)[torch.randperm(64)]  # a sum says how often each power is in it
    with emulation():
        for stride in (1, 2, 8, 32):
            for blocks, threads in ((1, 32), (3, 64)):
                assert memory_patterns.read_columns(x, stride, blocks, threads).sum() == x.sum()
        with pytest.raises(ValueError, match="power of 2"):
            memory_patterns.read_columns(x, 24, 1, 32)


@needs_compiler
def test_walks_go_around_the_ring_and_reads_add_up() -> None:
    """One ring of all places, in either memory; every number of x in each repeat."""
    place, cycles = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with emulation():
        for level, distance, places in (("L2", 4, 16), ("shared", 1, memory_levels.RING_SHARED)):
            following, visited = memory_levels.ring(places, distance, CPU), []
            for _ in range(16):
                memory_levels.walk(level, places // 16, following, place, cycles)
                visited.append(place.item())
            assert len(set(visited)) == 16
            assert visited[-1] == 0, "back where it began"
            assert cycles.item() == 100, "the emulation's clock counts its readings"
        chain = torch.tensor([3.0])
        memory_levels.walk("registers", 3, chain, place, cycles)
        assert chain.item() == 3 / 8 + 1 + 1 / 2 + 1 / 4
        x, sums = torch.randint(-9, 9, (1024,)).float(), torch.zeros(64)
        memory_levels.launch("read_global", 2, 32, x, sums, 256, 3)
        assert sums.sum() == 3 * x.sum()
        memory_levels.launch("read_shared", 1, 64, x, sums, 2)
        assert torch.equal(sums.view(2, 32), 2 * x.view(32, 32).sum(0).expand(2, 32))
        memory_levels.launch("use_registers", 1, 64, sums, 0.5, 1)
        assert torch.equal(sums, torch.full((64,), 8 + 0.5 * 28))


@needs_compiler
@pytest.mark.parametrize("padding", [0, 1])
def test_shared_columns_add_up_rows(padding: int) -> None:
    x = torch.randint(-9, 9, (32, 32)).float()
    with emulation():
        found = memory_patterns.read_shared_columns(x, padding, 3, blocks=2)
    assert torch.equal(found, 3 * x.sum(dim=1).expand(2, 32))


@needs_compiler
@pytest.mark.parametrize("name", memory_patterns.PADDED)
def test_kernels_without_padding_are_right_too(name: str) -> None:
    padded = memory_patterns.PADDED[name]
    q, k, v = (torch.randn(70, 16).to(padded.dtype) for _ in range(3))
    with emulation():
        call = cuda_launch.prepare(q, k, v, False, None, head_dims=(16,), dtypes=(padded.dtype,))
        padded.run(call)
        expected, lse = padded.step.attention(q, k, v)
    assert torch.equal(call.out, expected)
    assert torch.equal(call.lse, lse)


def test_what_a_gpu_measures_compiles() -> None:
    if cuda_compile.nvrtc() is None and cuda_compile.nvcc() is None:
        pytest.skip("there is neither NVRTC (pip install nvidia-cuda-nvrtc) nor nvcc")
    padded = memory_patterns.PADDED["tensor cores"]
    assert b"walk_global" in cuda_compile.cubin(cuda_compile.source("measure/memory_levels.cu"), 90)
    sources = {
        "read_columns": cuda_compile.source("measure/memory_patterns.cu"),
        "read_shared_columns": cuda_compile.source("measure/memory_patterns.cu", PADDING=1),
        padded.step.NAME: padded.step.source_for(64, padded.dtype)._replace(replaced=(padded.text, padded.without)),
    }
    codes = [cuda_compile.cubin(source, 90) for source in sources.values()]
    assert all(name.encode() in code for name, code in zip(sources, codes, strict=True))
    source = warps.source_for(64)
    plain, *changed = (
        cuda_compile.cubin(source._replace(flags=flags), 90) for flags in ((), *((x,) for x in ladder_rounding.FLAGS))
    )
    assert all(code != plain for code in changed), "the flags say something to the compiler"


# Tables of a GPU, with nothing but the GPU replaced -------------------------------------------------------------------


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short sequences in the emulation; every call takes a millisecond."""

    def run_once(run: Callable[[], Any], *_: Any, **__: Any) -> float:
        run()
        return 1.0

    def timed(run: Callable[[], Any], *_: Any, prefix: str = "") -> dict[str, float]:
        return {f"{prefix}ms": run_once(run), f"{prefix}median_ms": 1.0}

    monkeypatch.setattr(gpu, "cuda_problem", lambda device: None)
    monkeypatch.setattr(ladder_rounding, "cuda_problem", lambda device: None)
    monkeypatch.setattr(gpu, "compiled", lambda *_: cuda_launch.Kernel(None, None, 40, 0, 1024))  # type: ignore[arg-type]
    monkeypatch.setattr(gpu, "CUDA_LENGTHS", (40,))
    monkeypatch.setattr(gpu, "CUDA_HEADS", 2)
    for name, value in {"NUMBERS": 2**10, "BLOCKS": 2, "THREADS": 32, "REPEATS": 2, "SHAPE": (1, 1, 40, 16)}.items():
        monkeypatch.setattr(memory_patterns, name, value)
    monkeypatch.setattr(memory_patterns, "fastest_ms", run_once)
    monkeypatch.setattr(memory_levels, "fastest_ms", run_once)
    monkeypatch.setattr(gpu, "SHARED_LENGTH", 40)
    monkeypatch.setattr(shared_memory, "MEASURED", (shared_memory.Tile(32, 16, 16, stages=2),))
    monkeypatch.setattr(cuda_launch, "most_shared_bytes", lambda device: 227 * 1024)
    for module in (gpu, long):
        monkeypatch.setattr(module, "timed", timed)
    with emulation():
        yield


@needs_compiler
@pytest.mark.usefixtures("small_gpu")
def test_tables_of_kernels_in_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 9, one kernel that splits keys and those of one head; then tiles in dynamic shared memory."""
    every = gpu.cuda_calls(CPU)
    one_head = {name for name in every if name.startswith("block for each query")}
    assert len(one_head) == 4
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    (out,) = gpu.head_by_head(step04_standard.attention, q, k, v)
    torch.testing.assert_close(out, torch.softmax(q @ k.mT / math.sqrt(8), -1) @ v)
    calls = {name: call for name, call in every.items() if name not in one_head}
    monkeypatch.setattr(gpu, "cuda_calls", lambda device: calls)
    rows = finished(gpu.cuda(CPU)).rows
    assert [row["step"] for row in rows] == list(calls)
    assert all(row["error"] < (2e-3 if "float16" in row["step"] else 1e-5) for row in rows)
    assert rows[0]["tflops"] == pytest.approx(4 * 2 * 40 * 40 * 64 / 1e-3 / 1e12)
    assert [row["registers"] for row in rows] == [40] * 6 + [None] * 2
    table = finished(gpu.shared(CPU))
    (row,) = table.rows
    assert row["error"] < 2e-3
    assert (row["shared_kb"], row["tile"], row["stages"]) == (2 * 24 * 64 / 1024, "32 x 16", 2)
    assert "227 KB at most" in table.notes[0]


def test_what_numba_takes_is_that_of_its_one_signature() -> None:
    sizes = {"get_regs_per_thread": 40, "get_local_mem_per_thread": 256, "get_shared_mem_per_block": 16384}
    kernel = SimpleNamespace(**{name: lambda size=size: {"signature": size} for name, size in sizes.items()})
    assert gpu.numba_takes(kernel) == list(sizes.values())


class OneCall:
    """A clock on which every call takes a millisecond."""

    cache_bytes = 100

    def seconds(self, run: Callable[[], Any], calls: int) -> float:
        run()
        return 1e-3


@needs_compiler
@pytest.mark.usefixtures("small_gpu")
def test_table_of_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel in each dtype that it takes is attention, forward and backward, and rates are those of its work."""
    monkeypatch.setattr(dtypes, "cuda_problem", lambda device: None)
    monkeypatch.setattr(dtypes, "Clock", lambda device: OneCall())
    monkeypatch.setattr(dtypes, "rates", lambda device: dict.fromkeys(dtypes.DTYPES, Machine(1e9, 1e12)))
    monkeypatch.setattr(dtypes, "device_seconds", lambda run, clock: [clock.seconds(run, 1)])
    monkeypatch.setattr(dtypes, "STEP_9", {name: x for name, x in gpu.STEP_9.items() if "w" in name or "16" in name})
    monkeypatch.setattr(dtypes, "LENGTHS", (20,))
    monkeypatch.setattr(dtypes, "HEADS", (1, 2))
    table = finished(dtypes.dtypes(CPU))
    assert len(table.notes) == 1, table.notes
    assert dtypes.SECONDS + dtypes.BLOCKS_SECONDS < 9 * 60, "what the page says"
    limits = {"float32": 2e-5, "TF32": 2e-5, "float16": 2e-2, "bfloat16": 1e-1}
    assert all(row["error"] < limits[row["dtype"]] for row in table.rows)
    names = {dtype: {row["step"] for row in table.rows if row["dtype"] == dtype} for dtype in limits}
    everywhere = {"4 standard PyTorch", "SDPA", "10 compiled variants", "11 flashtile.attention"}
    assert names["TF32"] == everywhere
    assert names["float32"] - everywhere == {"9 CUDA C++, rows", "9 CUDA C++, warps"}
    assert names["bfloat16"] - everywhere == {"9 CUDA C++, tensor cores", "9 CUDA C++, two stages"}
    pairs = {"full": 20 * 20, "causal": 20 * 21 / 2}
    for row in table.rows:
        products = 2 if row["pass"] == "forward" else 5
        flops = 2 * products * 64 * row["heads"] * pairs[row["mask"]]
        assert row["tflops"] == pytest.approx(flops / 1e-3 / 1e12)
        assert row["peak_percent"] == pytest.approx(100 * row["tflops"] / 1e-3)
        assert row["limit"] == "compute"
    shown = show.dtypes_pivoted(table.rows)
    assert len(shown) == len(table.rows)


@needs_compiler
@pytest.mark.usefixtures("small_gpu")
def test_table_of_large_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates count the products of visible pairs; only what runs here has a row."""
    monkeypatch.setattr(large, "cuda_problem", lambda device: None)
    monkeypatch.setattr(large, "Clock", lambda device: OneCall())
    monkeypatch.setattr(large, "rates", lambda device: {"float16": Machine(1e9, 1e12)})
    monkeypatch.setattr(large, "device_seconds", lambda run, clock: [clock.seconds(run, 1)])
    monkeypatch.setattr(large, "LENGTH", 20)
    monkeypatch.setattr(large, "HEADS", 1)
    rows = finished(large.large(CPU)).rows
    kernels = ["9 CUDA C++, tensor cores", "9 CUDA C++, two stages", STEP]
    assert [row["step"] for row in rows] == [*kernels, STEP] * 2
    assert [row["tflops"] for row in rows[:4]] == pytest.approx(
        [x * 20 * 20 * 128 / 1e-3 / 1e12 for x in (4, 4, 4, 10)]
    )
    assert rows[4]["tflops"] == pytest.approx(rows[0]["tflops"] / 2)


def test_own_work_counts_scores_where_they_leave_the_cache() -> None:
    """Standard attention's S and P: in HBM when one of them is larger than L2, and in L2 before."""
    shape = Shape.square(512, 64)
    least = iomodel.flash2_forward(shape, 512, 512).moved
    step = "4 standard PyTorch"
    assert dtypes.own_work(step, "forward", shape, 4 * 512 * 512)[1] == least
    assert dtypes.own_work(step, "forward", shape, 4 * 512 * 512 - 1)[1] == iomodel.standard_forward(shape).moved
    assert dtypes.own_work("SDPA", "forward", shape, 0)[1] == least
    assert dtypes.own_work("SDPA", "backward", shape, 0)[1] == least + 4 * 512 * 64 * 4


@needs_compiler
@pytest.mark.usefixtures("small_gpu")
def test_steps_of_a_gpu_in_other_tables() -> None:
    """What `stack` and `long` run: each in the dtype that it takes, on the same q, k and v."""
    q, k, v = (torch.randn(40, 64) for _ in range(3))
    expected, _ = step04_standard.attention(q.double(), k.double(), v.double())
    steps = gpu.gpu_steps(CPU)
    assert list(steps) == list(gpu.STEP_9)
    for (name, prepare), (_, dtype) in zip(steps.items(), gpu.STEP_9.values(), strict=True):
        out, _ = prepare(q, k, v)()
        assert out.dtype is dtype
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3 if "float16" in name else 1e-5)


def test_steps_that_a_machine_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.gpu_steps(CPU) == {}
    missing = gpu.missing_gpu_steps(CPU)
    assert [words.partition(": ")[0] for words in missing] == ["Step 7 for CUDA is missing", "Step 9 is missing"]

    def broken(*_: Any) -> None:
        raise OSError("libNVVM cannot be found.\nMore")

    monkeypatch.setattr(gpu.step07_numba_cuda, "attention", broken)
    gpu.numba_problem.cache_clear()
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    assert gpu.numba_problem(torch.device("cuda")) == "OSError: libNVVM cannot be found."
    gpu.numba_problem.cache_clear()


@needs_compiler
@pytest.mark.usefixtures("small_gpu")
def test_tables_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = finished(gpu.coalescing(CPU)).rows
    assert [row["stride"] for row in loads] == list(memory_patterns.STRIDES)
    assert all(row["gb_per_s_used"] == pytest.approx(4 * 2**10 / 1e-3 / 1e9) for row in loads)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1))
    for name, value in {
        "WARPS_OF_A_MULTIPROCESSOR": 8,
        "RINGS": {"L2": 4, "HBM": 8},
        "STEPS": dict.fromkeys(memory_levels.STEPS, 10),
        "REPEATS": dict.fromkeys(memory_levels.REPEATS, 2),
        "READ_BYTES": {"L2": 2**14, "HBM": 2**15},
    }.items():
        monkeypatch.setattr(memory_levels, name, value)
    levels = {row["level"]: row for row in finished(gpu.memory(CPU)).rows}
    assert list(levels) == ["registers", "shared", "L2", "HBM"]
    assert levels["L2"]["tb_per_s"] == pytest.approx(2 * 2**14 / 1e-3 / 1e12)
    assert levels["registers"]["tb_per_s"] == pytest.approx(256 * 2 * 8 * 16 / 1e-3 / 1e12)
    assert all(row["latency_ns"] == 1e5 and row["latency_cycles"] == 10 for row in levels.values())
    banks = finished(gpu.banks(CPU)).rows
    assert [row["kernel"] for row in banks] == ["columns of a tile", "step 9, registers", "step 9, tensor cores"]


@needs_compiler
@pytest.mark.usefixtures("small_gpu")
def test_table_of_rounding_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder_rounding, "ROUNDING_SHAPE", (20, 16))
    rows = [row for row in finished(ladder_rounding.rounding(CPU)).rows if row["where"] == "GPU"]
    assert [row["change"] for row in rows] == ["none", *ladder_rounding.FLAGS] * 2
    assert {row["scale"] for row in rows} == {1.0, 0.25}
    assert all(row["out_error"] < 1e-5 for row in rows)


@pytest.mark.parametrize("name", ["cuda", "shared", "memory", "coalescing", "banks"])
def test_without_a_gpu_they_say_so(name: str) -> None:
    table = finished(getattr(gpu, name)(CPU))
    assert not table.rows
    assert "move them to an NVIDIA GPU" in table.notes[0]


@pytest.mark.usefixtures("small_gpu")
def test_long_sequences_that_do_not_fit_or_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16 GiB.\nMore")

    monkeypatch.setattr(long, "LONG_LENGTHS", (128, 256))
    monkeypatch.setattr(long, "MOST", {"6 FlashAttention-2": 128})
    monkeypatch.setattr(long, "gpu_steps", lambda device: {})
    right = step04_standard.attention
    monkeypatch.setattr(step04_standard, "attention", lambda q, k, v: {128: right, 256: no_room}[len(k)](q, k, v))
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda s, dim: {128: softmax, 256: no_room}[len(s)](s, dim=dim))
    monkeypatch.setattr(long, "with_kept_buffers", lambda q, k, v: no_room)
    monkeypatch.setattr(long, "error_of", lambda *_: 0.0)
    table = finished(long.long(CPU))
    names = [(row["n"], row["step"]) for row in table.rows]
    assert names[:3] == [(128, "4 standard PyTorch"), (128, "4 without lse"), (128, "6 FlashAttention-2")]
    assert names[3:] == [(128, "11 flashtile.attention"), (256, "11 flashtile.attention")]
    assert table.rows[2]["speedup"] == 1
    assert table.rows[-1]["speedup"] is None
    assert "does not fit at N = 256: CUDA out of memory. Tried to allocate 16 GiB." in " ".join(table.notes)
    assert "6 FlashAttention-2 is left out at N = 256" in " ".join(table.notes)
    assert all(row.keys() == table.rows[0].keys() for row in table.rows)


@pytest.mark.gpu
@needs_gpu
def test_memory_on_a_gpu() -> None:
    """Strided loads and conflicts cost what their pages say, at least in part."""
    device = torch.device("cuda")
    loads = list(memory_patterns.coalescing(device))
    assert loads[-1]["slower"] > 3
    x = torch.ones(2**12, device=device)
    for stride in memory_patterns.STRIDES:
        assert memory_patterns.read_columns(x, stride, 4, 64).sum().item() == 2**12
    levels = {row["level"]: row for row in memory_levels.levels(device)}
    assert levels["registers"]["latency_ns"] < levels["shared"]["latency_ns"] < levels["L2"]["latency_ns"]
    assert levels["shared"]["tb_per_s"] > levels["L2"]["tb_per_s"] > levels["HBM"]["tb_per_s"]
    banks = {row["kernel"]: row["slower"] for row in memory_patterns.bank_conflicts(device)}
    assert banks["columns of a tile"] > 5
    assert all(math.isfinite(slower) for slower in banks.values())
    tile = torch.randint(-9, 9, (32, 32), device=device).float()
    for padding in (0, 1):
        found = memory_patterns.read_shared_columns(tile, padding, 3, blocks=2)
        assert torch.equal(found, 3 * tile.sum(dim=1).expand(2, 32))
