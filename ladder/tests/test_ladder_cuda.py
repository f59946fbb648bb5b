"""Step 9 of the ladder: results on a GPU, and without one in an emulation of its threads, warps and instructions; bugs
that the page shows, and what sees them; machine code for GPUs that are not here.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ladder_cases import dense_case, needs_compiler
from torch import Tensor

from flashtile.testing.case import Case
from flashtile.testing.tolerance import compare
from flashtile_ladder._host import cuda_compile, cuda_launch, cuda_steps
from flashtile_ladder._host.cuda_compile import CudaUnavailableError
from flashtile_ladder._host.cuda_steps import HALVES, registers, rows, stages, tensor_cores, warps
from flashtile_ladder._host.emulation import ORDERS, EmulationError, emulation

STEPS = {
    "rows": rows,
    "warps": warps,
    "registers": registers,
    "tensor cores": tensor_cores,
    "two stages": stages,
}
BUGS = registers.bugs
PAGE = Path(__file__).parents[1] / "docs" / "ladder.md"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def case_of(n: int, d: int, *, batch: int = 1, heads: int = 1, heads_kv: int = 1, **given: Any) -> Case:
    given = {"dtype": torch.float32, "kind": "normal"} | given
    sizes = {"num_heads_q": heads, "num_heads_kv": heads_kv, "seqlen_q": n, "seqlen_k": n, "head_dim": d}
    return dense_case(batch=batch, forward_only=True, **sizes, **given)


def results(step: Any, case: Case, device: str = "cpu", **keywords: Any) -> dict[str, Tensor]:
    """out and lse; of one head as `[N, d]`, of more as `[B, heads, N, d]`."""
    q, k, v = (case.arguments[name].to(device) for name in "qkv")
    given = {name: case.arguments[name] for name in ("causal", "scale") if name in case.arguments} | keywords
    if q.shape[:2] != (1, 1):
        out, lse = step.attention(q, k, v, **given)
        return {"out": out.cpu(), "lse": lse.cpu()}
    out, lse = step.attention(q[0, 0], k[0, 0], v[0, 0], **given)
    return {"out": out.cpu()[None, None], "lse": lse.cpu()[None, None]}


def right(found: dict[str, Tensor], case: Case) -> bool:
    return all(deviation.ok for deviation in compare(found, case) if deviation.name in found)


def assert_right(name: str, case: Case, device: str = "cpu") -> None:
    found = results(STEPS[name], case, device)
    for deviation in compare(found, case):
        assert deviation.name not in found or deviation.ok, f"{name}: {deviation}\n{case.description}"


def dtypes_of(name: str) -> tuple[torch.dtype, ...]:
    return STEPS[name].dtypes


# Results -------------------------------------------------------------------------------------------------------------

# Tiles are of 32 keys and 128 rows; of one row; of 32 keys and 64 rows; of 64 keys and 64 or 128 rows.
EMULATED = [
    ("forward", 1, {}),
    ("backward", 33, {"causal": True}),
    ("shuffled", 70, {}),
    ("backward", 64, {"kind": "outliers"}),
    ("forward", 129, {"causal": True, "kind": "ramp"}),
    ("shuffled", 40, {"batch": 2, "heads": 4, "heads_kv": 2, "causal": True, "scale": -0.4}),
]


@needs_compiler
@pytest.mark.parametrize("name", STEPS)
def test_in_the_emulation(name: str) -> None:
    for number, (order, n, given) in enumerate(EMULATED):
        dtypes = dtypes_of(name)
        case = case_of(n, 16, dtype=dtypes[number % len(dtypes)], **given)
        with emulation(order):
            assert_right(name, case)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "d"), [("rows", 32), ("warps", 40), ("registers", 64), ("tensor cores", 64), ("two stages", 64)]
)
def test_wider_heads_in_the_emulation(name: str, d: int) -> None:
    """More than a register for each lane; more than a product for each row of q."""
    for causal in (False, True):
        with emulation("shuffled"):
            assert_right(name, case_of(70, d, dtype=dtypes_of(name)[0], causal=causal))


GPU_LENGTHS = (1, 31, 32, 33, 64, 65, 100, 128, 129, 257, 1000)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("d", [16, 32, 64, 128])
@pytest.mark.parametrize("name", STEPS)
def test_on_a_gpu(name: str, d: int) -> None:
    if d not in STEPS[name].HEAD_DIMS:
        pytest.skip(f"{name} takes no d of {d}")
    for dtype in dtypes_of(name):
        for n in GPU_LENGTHS:
            for causal in (False, True):
                assert_right(name, case_of(n, d, dtype=dtype, causal=causal), "cuda")
        for kind in ("outliers", "ramp", "ties"):
            assert_right(name, case_of(150, d, dtype=dtype, kind=kind, causal=True), "cuda")
        grouped = {"batch": 2, "heads": 6, "heads_kv": 2}
        assert_right(name, case_of(77, d, dtype=dtype, **grouped), "cuda")
        assert_right(name, case_of(200, d, dtype=dtype, causal=True, scale=-0.4, **grouped), "cuda")


# Bugs that the page shows --------------------------------------------------------------------------------------------

# Problems that each computes right, and those that it does not: what `BUGS` says in words.
HIDDEN_AND_SEEN: dict[str, tuple[list[tuple[int, bool]], list[tuple[int, bool]]]] = {
    "register": ([(1, False), (20, True), (32, False)], [(64, False), (64, True), (100, False)]),
    "key as row": ([(32, False), (64, False), (64, True), (33, True)], [(1, False), (33, False), (65, False)]),
    "tile": ([(32, True), (100, False)], [(64, True), (70, True)]),
}


def assert_bug_is_where_it_is_said_to_be(name: str, device: str) -> None:
    hidden, seen = HIDDEN_AND_SEEN[name]
    for n, causal in hidden + seen:
        case = case_of(n, 16, causal=causal)
        assert right(results(registers, case, device), case)
        wrong = results(registers, case, device, bug=name)
        assert right(wrong, case) == ((n, causal) in hidden), f"{name}: N = {n}, causal = {causal}"


@needs_compiler
@pytest.mark.parametrize("name", BUGS)
def test_bugs_in_the_emulation(name: str) -> None:
    with emulation():
        assert_bug_is_where_it_is_said_to_be(name, "cpu")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", BUGS)
def test_bugs_on_a_gpu(name: str) -> None:
    assert_bug_is_where_it_is_said_to_be(name, "cuda")


# Each barrier and wait, without which some order of the threads goes wrong.
BARRIERS = [
    ("rows", "__syncthreads();  // the tile is there"),
    ("rows", "__syncthreads();  // no thread reads the tile any more"),
    ("warps", "__syncthreads();"),
    ("registers", "__syncthreads();  // the tiles are there"),
    ("registers", "__syncthreads();  // no thread reads the tiles any more"),
    ("registers", "__syncwarp();"),
    ("tensor cores", "__syncthreads();  // no thread reads the last V any more"),
    ("tensor cores", "__syncthreads();  // no thread reads K any more: V takes its place"),
    ("tensor cores", "wait_for_copies();\n"),
    ("tensor cores", "__syncthreads();\n}"),
    ("two stages", "wait_for_copies();\n"),
    (
        "two stages",
        "__syncthreads();  // this tile is there for all threads, and no thread reads the last one any more",
    ),
]


WAIT = re.compile(r"(?:__syncthreads\(\)|__syncwarp\(\)|wait_for_copies\(\));")


@pytest.mark.parametrize("name", STEPS)
def test_every_barrier_is_listed(name: str) -> None:
    text = STEPS[name].source_for(16, dtypes_of(name)[0]).text
    assert len(WAIT.findall(text)) == sum(kernel == name for kernel, _ in BARRIERS)


@needs_compiler
@pytest.mark.parametrize(("name", "barrier"), BARRIERS)
def test_every_barrier_is_needed(name: str, barrier: str) -> None:
    """And the emulation would see one that is missing."""
    step = replace(STEPS[name], replaced=(barrier, "}" if barrier.endswith("}") else ""))
    case = case_of(130 if step.dtypes == HALVES else 70, 16, dtype=dtypes_of(name)[0])  # three tiles of keys
    for order in ORDERS:
        with emulation(order):
            try:
                if not right(results(step, case), case):
                    return
            except EmulationError:
                return
    raise AssertionError("no order shows it")


# Machine code --------------------------------------------------------------------------------------------------------

NO_SPILLS = ("--ptxas-options=--warn-on-spills", "--ptxas-options=--warning-as-error")
COMPILERS = {"nvrtc": cuda_compile.by_nvrtc, "nvcc": cuda_compile.by_nvcc}


def compile_with(compiler: str, source: cuda_compile.Source, arch: int) -> bytes:
    if getattr(cuda_compile, compiler)() is None:
        pytest.skip(f"there is no {compiler}")
    return COMPILERS[compiler](source, arch)


@pytest.mark.parametrize(
    ("name", "arch"),
    [(name, arch) for name in STEPS for arch in ((75, 80, 90) if STEPS[name].dtypes == HALVES else (75, 90))],
)
def test_compiles_for_a_gpu_that_is_not_here(name: str, arch: int) -> None:
    """By whichever compiler is there (NVRTC's package is among the tests' requirements), with all in registers."""
    if cuda_compile.nvrtc() is None and cuda_compile.nvcc() is None:
        pytest.skip("there is neither NVRTC (pip install nvidia-cuda-nvrtc) nor nvcc")
    step = STEPS[name]
    if step.dtypes == HALVES and arch < 80:
        with pytest.raises(CudaUnavailableError, match="requires"):
            cuda_compile.cubin(step.source_for(16), arch)
        return
    for dtype in dtypes_of(name):
        for d in {16, min(128, max(step.HEAD_DIMS))}:
            code = cuda_compile.cubin(step.source_for(d, dtype)._replace(flags=NO_SPILLS), arch)
            assert code[:4] == b"\x7fELF"
            assert step.NAME.encode() in code


@pytest.mark.parametrize("compiler", COMPILERS)
def test_what_a_compiler_says_is_quoted(compiler: str) -> None:
    source = warps.source_for(16)._replace(replaced=("float m_all", "flot m_all"))
    with pytest.raises(CudaUnavailableError, match='identifier "flot" is undefined'):
        compile_with(compiler, source, 90)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_spills_are_seen(compiler: str) -> None:
    """q and acc of a row of 128 are more numbers than a thread has registers: hence the limit of that step."""
    macros = {"HEAD_DIM": 128, "BLOCK_N": 32}
    source = cuda_compile.source("step09_cuda_rows.cu", *NO_SPILLS, **macros)
    with pytest.raises(CudaUnavailableError, match="Registers are spilled"):
        compile_with(compiler, source, 90)


def test_nvcc_compiles_what_nvrtc_does() -> None:
    for step, dtype in ((registers, torch.float32), (tensor_cores, torch.bfloat16)):
        assert step.NAME.encode() in compile_with("nvcc", step.source_for(32, dtype), 80)


def test_bugs_are_single_lines_and_the_page_shows_them() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for bug in BUGS:
        source = registers.source_for(16)
        plain, changed = source.text, cuda_steps.with_bug(source, BUGS[bug]).text
        lines = [(a, b) for a, b in zip(plain.splitlines(), changed.splitlines(), strict=True) if a != b]
        assert len(lines) == 1
        for mark, line in zip("-+", lines[0], strict=True):
            assert f"\n{mark}{line.partition('  // ')[0]}\n" in page
    with pytest.raises(ValueError, match="not there once"):
        _ = cuda_compile.source("step09_cuda_rows.cu", replaced=("float", "double")).text


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", STEPS)
def test_nothing_spills(name: str) -> None:
    step = STEPS[name]
    for dtype in dtypes_of(name):
        for d in {16, 64, min(128, max(step.HEAD_DIMS))}:
            kernel = cuda_launch.kernel(step.source_for(d, dtype), step.NAME, torch.cuda.current_device())
            assert kernel.spilled_bytes == 0
            assert 0 < kernel.registers <= 255
            assert kernel.shared_bytes <= 48 * 1024
            assert (kernel.shared_bytes == 0) == (step.dtypes == HALVES), "the launch says how much it has"


# What is said where it does not run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_without_a_gpu_step_9_says_so(name: str) -> None:
    with pytest.raises(CudaUnavailableError, match="the tensors are on cpu: move them to an NVIDIA GPU"):
        STEPS[name].attention(*torch.randn(3, 5, 16))


def test_an_older_gpu_runs_what_its_instructions_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three kernels of five are for float32 and need no `cp.async`: they run on compute capability 7.5."""
    device, dtypes = torch.device("cuda", 0), (torch.float32, torch.float16, torch.bfloat16)
    for capability, runs in (((7, 0), []), ((7, 5), [torch.float32]), ((8, 0), list(dtypes)), ((9, 0), list(dtypes))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert [dtype for dtype in dtypes if cuda_launch.unavailable(device, dtype) is None] == runs
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert cuda_launch.unavailable(device, torch.float16) == (
        "the GPU has compute capability (7, 5), and kernels of torch.float16 need (8, 0)"
    )


def test_without_a_compiler_step_9_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvrtc_paths", "toolkits"):
        monkeypatch.setattr(cuda_compile, name, lambda: ())
    monkeypatch.setattr(cuda_compile, "nvrtc", cuda_compile.nvrtc.__wrapped__)  # without what it has found before
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CudaUnavailableError, match="found no compiler: `pip install nvidia-cuda-nvrtc`"):
        cuda_compile.cubin.__wrapped__(rows.source_for(16), 90)


@pytest.mark.parametrize(
    ("name", "shapes", "dtype", "message"),
    [
        ("rows", [(5, 24)] * 3, torch.float32, "d in"),
        ("registers", [(5, 128)] * 3, torch.float32, "d in"),
        ("warps", [(0, 16)] * 3, torch.float32, "N at least 1"),
        ("warps", [(5, 16), (6, 16), (6, 16)], torch.float32, "one N for all"),
        ("warps", [(5, 16), (5, 16), (5, 8)], torch.float32, "one N for all"),
        ("warps", [(1, 5, 16)] * 3, torch.float32, r"\[B, heads, N, d\]"),
        ("warps", [(1, 5, 4, 16), (1, 2, 4, 16), (1, 2, 4, 16)], torch.float32, "multiple of key heads"),
        ("warps", [(1, 1, 4, 16), (2, 1, 4, 16), (2, 1, 4, 16)], torch.float32, "in one batch"),
        ("warps", [(1, 70000, 1, 1)] * 3, torch.float32, "65535"),
        ("warps", [(5, 16)] * 3, torch.float64, "float32"),
        ("tensor cores", [(5, 16)] * 3, torch.float32, "float16"),
    ],
)
def test_limits_are_errors(
    name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_launch, "unavailable", lambda device, dtype=None: None)
    with pytest.raises(ValueError, match=message):
        STEPS[name].attention(*(torch.zeros(shape, dtype=dtype) for shape in shapes))


def test_sources_lie_next_to_their_modules() -> None:
    """So that a wheel has them: it takes all files of the package's folder."""
    for step in STEPS.values():
        assert (cuda_compile.FOLDER / step.source_for(16, dtypes_of_step(step)).file).is_file()
    assert (cuda_compile.FOLDER / cuda_compile.HEADER).is_file()


def test_nvcc_is_found_in_the_path_and_in_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    here = cuda_compile.nvcc()
    assert here is None or here.startswith("/usr/local/cuda")
    command = tmp_path / "bin" / "nvcc"
    command.parent.mkdir()
    command.write_text("")
    command.chmod(0o700)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert cuda_compile.nvcc() == str(command)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(command.parent))
    assert cuda_compile.nvcc() == str(command)


def dtypes_of_step(step: Any) -> torch.dtype:
    return next(dtypes_of(name)[0] for name, other in STEPS.items() if other is step)
