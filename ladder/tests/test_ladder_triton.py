"""Step 8 of the ladder: results in Triton's interpreter and on a GPU, and what is said where neither is there.

Whether Triton interprets is settled when it is imported, so the interpreter runs in a process of its own.
"""

import difflib
import importlib.util
import inspect
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ladder_cases import dense_case
from simulated import run_simulated
from torch import Tensor

from flashtile.testing.case import Case
from flashtile.testing.tolerance import compare
from flashtile_ladder import (
    step04_standard,
    step08_triton_backward,
    step08_triton_lite,
    step08_triton_lse,
    step08_triton_online,
)
from flashtile_ladder._host import triton_or_not
from flashtile_ladder.related import triton_any_size

TILE = step08_triton_lite.BLOCK_M
needs_triton = pytest.mark.skipif(not triton_or_not.INSTALLED, reason="Triton is not installed")


def problems() -> list[tuple[str, Case]]:
    """A step with a case: online and lse for every length that they take, lite for one tile and for more."""
    found = []

    def add(
        module: str, n: int, d: int, dtype: torch.dtype = torch.float32, kind: str = "normal", **given: Any
    ) -> None:
        case = dense_case(
            batch=1,
            num_heads_q=1,
            seqlen_q=n,
            seqlen_k=n,
            head_dim=d,
            dtype=dtype,
            kind=kind,
            forward_only=True,
            **given,
        )
        found.append((module, case))

    for n in (TILE, 2 * TILE, 4 * TILE):
        add("step08_triton_lite", n, 64)
        add("step08_triton_online", n, 64)
    add("step08_triton_online", 2 * TILE, 32, torch.float16)
    add("step08_triton_online", 3 * TILE, 128, kind="ramp")
    add("step08_triton_online", 2 * TILE, 16, scale=-0.4)
    for n in (1, TILE - 1, TILE, TILE + 1, 200):
        for causal in (False, True):
            add("step08_triton_lse", n, 32, causal=causal)
    add("step08_triton_lse", 150, 64, torch.float16, causal=True)
    for kind in ("outliers", "ramp", "ties"):
        add("step08_triton_lse", 150, 16, kind=kind, causal=True)
    add("step08_triton_lse", 70, 16, scale=-0.4)
    return found


PROBLEMS = problems()


def arguments(case: Case, device: str = "cpu") -> dict[str, Any]:
    """Of a step's `attention`: one head."""
    given = {name: case.arguments[name][0, 0].to(device) for name in "qkv"}
    return given | {name: case.arguments[name] for name in ("causal", "scale") if name in case.arguments}


def assert_right_but_lite(results: list[tuple[Tensor, Tensor | None]]) -> None:
    """Within the contract's bound; "lite" is right in one tile, and far from it in more."""
    for (module, case), (out, lse) in zip(PROBLEMS, results, strict=True):
        assert (lse is not None) == (module == "step08_triton_lse")
        found = {"out": out.cpu()[None, None]} | ({} if lse is None else {"lse": lse.cpu()[None, None]})
        deviations = {deviation.name: deviation for deviation in compare(found, case) if deviation.name in found}
        if module == "step08_triton_lite" and len(out) > TILE:
            assert deviations["out"].ratio > 1e4
            torch.testing.assert_close(out.cpu(), sum_of_tile_attentions(case).float())
            continue
        for deviation in deviations.values():
            assert deviation.ok, f"{module}: {deviation}\n{case.description}"


def sum_of_tile_attentions(case: Case) -> Tensor:
    """What "lite" computes, as its page says."""
    q, k, v = (case.arguments[name][0, 0].double() for name in "qkv")
    parts = zip(k.split(TILE), v.split(TILE), strict=True)
    return sum((torch.softmax(q @ k_j.mT / q.shape[-1] ** 0.5, 1) @ v_j for k_j, v_j in parts), torch.zeros_like(q))


def tiles() -> list[tuple[str, dict[str, Any]]]:
    """Several heads, in those of FlashAttention-2's four tiles that are not step 8's own."""
    q, k, v = (torch.randn(1, 2, 130, 16) for _ in range(3))
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "causal": True}
    return [("step08_triton_lse", arguments | {"block_m": m, "block_n": n}) for m, n in ((64, 128), (128, 64))]


TILES = tiles()


def assert_right_in_each_head(results: list[tuple[Tensor, Tensor]]) -> None:
    for (_, given), found in zip(TILES, results, strict=True):
        for head in range(2):
            exact = step04_standard.attention(*(given[x][0, head].double() for x in "qkv"), True)
            for x, y in zip(found, exact, strict=True):
                torch.testing.assert_close(x[0, head].cpu().double(), y, rtol=0, atol=5e-6)


def gradients(device: str = "cpu") -> list[tuple[str, dict[str, Any]]]:
    """Backward: partial tiles, tiles that differ, more heads than one, and scores whose lse is far below 0."""
    calls: list[tuple[str, dict[str, Any]]] = []
    for n, causal, tiles, lowered in ((1, False, None, 0), (70, True, (32, 64, 16, 32), 0), (70, False, None, 35)):
        q, k, v, dout = (torch.randn(1, 2, n, 16, device=device) for _ in range(4))
        if lowered:
            q, k = q.abs(), k - lowered
        given = {"q": q, "k": k, "v": v, "causal": causal, "scale": 0.3, "dout": dout, "tiles": tiles}
        calls.append(("step08_triton_backward", given))
    return calls


def assert_gradients_are_right(calls: list[tuple[str, dict[str, Any]]], results: list[Any]) -> None:
    for (_, given), found in zip(calls, results, strict=True):
        leaves = [given[name].cpu().double().requires_grad_() for name in "qkv"]
        s = given["scale"] * (leaves[0] @ leaves[1].mT)
        if given["causal"]:
            s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1) > 0, -math.inf)
        exact = torch.autograd.grad(torch.softmax(s, -1) @ leaves[2], leaves, given["dout"].cpu().double())
        for x, y in zip(found[2:], exact, strict=True):
            torch.testing.assert_close(x.cpu().double(), y, rtol=1e-3, atol=1e-4 * max(1.0, float(y.abs().max())))


def further(device: str = "cpu") -> list[tuple[str, dict[str, Any]]]:
    """A kernel that is no step: of any size, also of strided heads, with the running log-sum-exp too."""
    calls: list[tuple[str, dict[str, Any]]] = []
    for number, (rows, keys, d) in enumerate(((1, 1, 1), (8, 8, 16), (65, 70, 24), (70, 70, 16), (130, 130, 16))):
        q, k = (torch.randn(n, 3, d, device=device)[:, 1] for n in (rows, keys))
        given = {"q": q, "k": k, "v": torch.randn(d, keys, device=device).mT, "causal": rows == keys > 8}
        calls.append(("related.triton_any_size", given | {"softmax": triton_any_size.SOFTMAXES[1 + number % 2]}))
    return calls


def assert_further_are_right(calls: list[tuple[str, dict[str, Any]]], results: list[Any]) -> None:
    for (_, given), found in zip(calls, results, strict=True):
        exact = attention_of(*(given[name] for name in ("q", "k", "v", "causal")))
        for x, y in zip(found, exact, strict=True):
            torch.testing.assert_close(x.cpu().double(), y, rtol=0, atol=5e-6)


def attention_of(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """out and lse in float64; q and k may differ in number."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    s = q @ k.mT / math.sqrt(q.shape[1])
    if causal:
        s = s.masked_fill(torch.ones(s.shape).triu(1) > 0, -math.inf)
    return torch.softmax(s, 1) @ v, torch.logsumexp(s, 1)


@needs_triton
def test_in_the_interpreter(tmp_path: Path) -> None:
    """Lite of any size too: right with all keys in one tile, of any number, and wrong with two. And an exercise."""
    calls, others = [(module, arguments(case)) for module, case in PROBLEMS], further()
    slopes = gradients()
    q, k, v = torch.randn(3, 65, 24)
    lite = [("related.triton_any_size", {"q": q, "k": k[:n], "v": v[:n], "softmax": "lite"}) for n in (24, 65)]
    exercise = ("exercise", {"name": "8a"})
    *results, judged = run_simulated(
        [*slopes, *calls, *TILES, *others, *lite, exercise], tmp_path, TRITON_INTERPRET="1"
    )
    assert_gradients_are_right(slopes, results[: len(slopes)])
    results = results[len(slopes) :]
    assert judged[0].startswith("Right on all")
    assert "the accumulator is not corrected when the maximum moves" in judged[1]
    assert_right_but_lite(results[: len(calls)])
    assert_right_in_each_head(results[len(calls) : len(calls) + len(TILES)])
    assert_further_are_right(others, results[len(calls) + len(TILES) : -2])
    (one, lse), (two, _) = results[-2:]
    assert lse is None
    torch.testing.assert_close(one.double(), attention_of(q, k[:24], v[:24])[0], rtol=0, atol=5e-6)
    assert float((two - attention_of(q, k, v)[0]).abs().max()) > 0.1


@needs_triton
@pytest.mark.parametrize(
    ("module", "arch", "precision", "instruction"),
    [
        (step08_triton_lite, 80, "ieee", ""),
        (step08_triton_online, 90, "tf32", "tf32"),
        (step08_triton_lse, 80, "fp16", "f16"),
        (step08_triton_backward, 90, "fp16", "f16"),
    ],
)
def test_compiles_for_a_gpu_that_is_not_here(
    module: Any, arch: int, precision: str, instruction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To machine code: Triton's interpreter takes more than its compiler does. Products are instructions of tensor
    cores in float16 and, where it is asked for, in TF32; "ieee" has none.
    """
    if triton_or_not.interprets(triton_or_not.tl.cdiv):
        pytest.skip("Triton interprets in this process")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = module.dkdv_kernel if module is step08_triton_backward else module.kernel
    pointers = dict.fromkeys((*"QKVO", "DO", "DK", "DV"), "*fp16" if precision == "fp16" else "*fp32")
    pointers |= {"LSE": "*fp32", "DELTA": "*fp32"}
    types = pointers | {"N": "i32", "scale": "fp32", "scale_log2": "fp32"}
    constants = {"D": 32, "BLOCK_M": 64, "BLOCK_N": 64, "CAUSAL": True, "EVEN": False}
    constants["PRECISION"] = "ieee" if precision == "fp16" else precision
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={name: value for name, value in constants.items() if name in names},
    )
    compiled = triton_or_not.triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_stages": 2})
    products = re.findall(r"^\s*(?:wg)?mma\S*\.m\d+n\d+k\d+\S*", compiled.asm["ptx"], re.MULTILINE)
    assert bool(products) == bool(instruction)
    assert all(instruction in product for product in products)
    assert compiled.asm["cubin"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu() -> None:
    modules = {m.__name__.rpartition(".")[2]: m for m in (step08_triton_lite, step08_triton_online, step08_triton_lse)}
    assert_right_but_lite([modules[module].attention(**arguments(case, "cuda")) for module, case in PROBLEMS])
    on_gpu = [{name: x.cuda() if isinstance(x, Tensor) else x for name, x in given.items()} for _, given in TILES]
    assert_right_in_each_head([step08_triton_lse.attention(**given) for given in on_gpu])
    calls = further("cuda")
    assert_further_are_right(calls, [triton_any_size.attention(**given) for _, given in calls])
    found = []
    for _, given in (slopes := gradients("cuda")):
        given = dict(given)
        dout, tiles = given.pop("dout"), given.pop("tiles")
        q, k, v, *mask = (given[name] for name in ("q", "k", "v", "causal", "scale"))
        saved = step08_triton_backward.attention(**given)
        found.append((*saved, *step08_triton_backward.backward(q, k, v, *saved, dout, *mask, tiles=tiles)))
    assert_gradients_are_right(slopes, found)
    q, k, v = (torch.randn(256, 64, device="cuda") for _ in range(3))
    exact = step04_standard.attention(q.double(), k.double(), v.double())[0]
    errors = [
        (step08_triton_lse.attention(q, k, v, input_precision=precision)[0] - exact).abs().max().item()
        for precision in triton_or_not.PRECISIONS
    ]
    assert errors[0] < 1e-5 < errors[1] < 1e-2, "TF32 has 11 bits of a factor"


@needs_triton
def test_without_a_gpu_it_says_so() -> None:
    """None of the four lets Triton's own error, "0 active drivers", through."""
    if triton_or_not.interprets(triton_or_not.tl.cdiv):
        pytest.skip("Triton interprets in this process")
    for module in (step08_triton_lite, step08_triton_online, step08_triton_lse, step08_triton_backward):
        with pytest.raises(triton_or_not.TritonUnavailableError, match="Triton compiles for GPUs alone"):
            module.attention(*torch.randn(3, 64, 16))


def test_without_triton_it_says_so() -> None:
    """All four modules import everywhere."""
    code = """
import sys
sys.modules['triton'] = None
import torch
from flashtile_ladder import STEPS
for step in STEPS:
    if step.number == 8:
        try:
            step.load().attention(*torch.randn(3, 64, 16))
        except RuntimeError as error:
            print(type(error).__name__, error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 4
    words = "Triton is not installed: `pip install triton`"
    assert all(line.startswith("TritonUnavailableError") and words in line for line in lines)


@needs_triton
def test_an_interpreter_switched_on_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own functions were compiled ones when it was imported, and this kernel is an interpreted one."""
    if triton_or_not.interprets(triton_or_not.tl.cdiv):
        pytest.skip("Triton interprets in this process")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = Path(step08_triton_lite.__file__)
    spec = importlib.util.spec_from_file_location("flashtile_ladder.step08_again", path)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    with pytest.raises(triton_or_not.TritonUnavailableError, match="set it before Python starts"):
        again.attention(*torch.randn(3, 64, 16))


def test_lite_and_online_differ_in_nine_lines_for_two() -> None:
    """The kernels and all around them; the page says so."""
    one, other = (
        inspect.getsource(m).partition('"""\n# pyright')[2].splitlines()
        for m in (step08_triton_lite, step08_triton_online)
    )
    marks = [line[0] for line in difflib.ndiff(one, other) if line[0] in "+-" and "`[N, d]` to out" not in line]
    assert (marks.count("+"), marks.count("-")) == (9, 2)


@needs_triton
@pytest.mark.parametrize(
    ("module", "shape", "changes", "message"),
    [
        (step08_triton_lite, (100, 64), {}, "multiple of 64"),
        (step08_triton_online, (64, 24), {}, "d in"),
        (step08_triton_online, (64, 16), {"causal": True}, "no causal"),
        (step08_triton_lse, (0, 16), {}, "N at least 1"),
        (step08_triton_online, (2, 4, 64, 16), {}, "takes .N, d. for all"),
        (step08_triton_lse, (4, 64, 16), {}, "or .B, heads, N, d."),
        (step08_triton_lite, (64, 16), {"dtype": torch.float64}, "float32, float16 or bfloat16"),
        (step08_triton_lse, (64, 16), {"input_precision": "tf32x3"}, "one of"),
    ],
)
def test_limits_are_errors(
    module: Any, shape: tuple[int, int], changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_or_not, "unavailable", lambda kernel, device: None)
    q = torch.zeros(shape, dtype=changes.pop("dtype", torch.float32))
    with pytest.raises(ValueError, match=message):
        module.attention(q, q, q, **changes)
