"""Every step of the ladder against the fp64 oracle, forward and backward; and what steps are said to get wrong."""

import importlib.util
import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ladder_cases import dense_case, needs_compiler
from simulated import run_simulated
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashtile.testing.case import Case
from flashtile.testing.tolerance import compare
from flashtile_ladder import (
    STEPS,
    step01_softmax,
    step02_autograd,
    step05_flash1,
    step06_flash2,
    step07_numba,
    step10_variants,
)
from flashtile_ladder._host import cpp as step03_cpp
from flashtile_ladder.related import softmax_passes, stream_k, tiled_matmul, unified_max


def step(module: str) -> Any:
    return next(step for step in STEPS if step.module == module).load()


def test_every_step_has_the_same_form() -> None:
    for listed in STEPS:
        module = listed.load()
        parameters = inspect.signature(module.attention).parameters
        assert list(parameters)[:5] == ["q", "k", "v", "causal", "scale"]
        assert (parameters["causal"].default, parameters["scale"].default) == (False, None)
        assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[5:])
        if listed.backward:
            names = list(inspect.signature(module.backward).parameters)
            assert names[:8] == ["q", "k", "v", "out", "lse", "dout", "causal", "scale"]


# Results -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A step with keywords, and which problems it can take."""

    module: str
    seqlen: int
    dtype: torch.dtype = torch.float32
    keywords: Any = ()
    backward: bool = True

    def results(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **settings: Any) -> dict[str, Tensor]:
        """out, lse and gradients, `[N, d]` and `[N]`."""
        module, keywords = step(self.module), dict(self.keywords) | settings
        if self.module == "step02_autograd":
            qkv: Any = [module.values(x.tolist()) for x in (q, k, v)]
        else:
            qkv = [q, k, v] if self.module != "step02_floats" else [x.tolist() for x in (q, k, v)]
        out, lse = module.attention(*qkv, **keywords)
        found = {"out": out, "lse": lse}
        if self.backward:
            given = dout.tolist() if isinstance(out, list) else dout
            found |= dict(zip(("dq", "dk", "dv"), module.backward(*qkv, out, lse, given, **keywords), strict=True))
        return {name: as_tensor(x) for name, x in found.items()}


def as_tensor(rows: Any) -> Tensor:
    """What a step on lists returns, as a tensor."""
    if isinstance(rows, Tensor):
        return rows
    plain = [
        [getattr(x, "data", x) for x in row] if isinstance(row, list) else getattr(row, "data", row) for row in rows
    ]
    return torch.tensor(plain, dtype=torch.float64)


double = torch.float64
RUNS = {
    "online": Run("step01_softmax", 21, backward=False),
    "online fp64": Run("step01_softmax", 21, double, backward=False),
    "autograd": Run("step02_autograd", 11, double),
    "floats": Run("step02_floats", 21, double),
    "standard": Run("step04_standard", 130),
    "standard fp64": Run("step04_standard", 130, double),
    "flash1 in one tile": Run("step05_flash1", 40),
    "flash1": Run("step05_flash1", 130, keywords=(("memory", 4 * 48 * 8),)),
    "flash1, tiles of one": Run("step05_flash1", 9, keywords=(("memory", 4 * 8),)),
    "flash1 fp64": Run("step05_flash1", 130, double, (("memory", 4 * 32 * 8),)),
    "flash2 in one tile": Run("step06_flash2", 40),
    "flash2": Run("step06_flash2", 130, keywords=(("block_m", 32), ("block_n", 32))),
    "flash2, wide": Run("step06_flash2", 130, keywords=(("block_m", 16), ("block_n", 48))),
    "flash2, tall": Run("step06_flash2", 130, keywords=(("block_m", 48), ("block_n", 16))),
    "flash2, tiles of one": Run("step06_flash2", 9, keywords=(("block_m", 1), ("block_n", 1))),
    "flash2 fp64": Run("step06_flash2", 130, double, (("block_m", 32), ("block_n", 24))),
    "variants": Run("step10_variants", 150),
    "variants, even": Run("step10_variants", 128),
    "variants fp64": Run("step10_variants", 150, double),
}
CPP = {
    f"{name} {flags[0]}": Run("step03_cpp", 40, keywords=(("flags", flags), ("graph", graph)))
    for flags in (step03_cpp.O2, step03_cpp.O3)
    for name, graph in (("raw", False), ("graph", True))
}
KINDS = ("normal", "outliers", "ramp", "ties")


def problem(run: Run, kind: str, **arguments: Any) -> tuple[Case, list[Tensor]]:
    """A case of one sequence and one head, and its q, k, v, dout as `[N, d]`."""
    case = dense_case(
        batch=1, num_heads_q=1, seqlen_q=run.seqlen, seqlen_k=run.seqlen, dtype=run.dtype, kind=kind, **arguments
    )
    case.dlse = None
    case.forward_only = not run.backward
    assert case.dout is not None
    return case, [x[0, 0] for x in (*(case.arguments[name] for name in "qkv"), case.dout)]


def check(run: Run, case: Case, tensors: list[Tensor], **settings: Any) -> None:
    found = {name: x[None, None] for name, x in run.results(*tensors, **settings).items()}
    worst = next(x for x in compare(found, case) if x.name != "dalibi_slopes")  # step 10 takes a slope as a number
    assert worst.ok, f"{run.module}: {worst}\n{case.description}"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", RUNS)
def test_against_the_oracle(name: str, causal: bool) -> None:
    run = RUNS[name]
    for kind in KINDS:
        case, tensors = problem(run, kind, causal=causal)
        check(run, case, tensors, causal=causal)


def test_deterministic_variant_against_the_oracle() -> None:
    case, (q, k, v, dout) = problem(RUNS["variants"], "normal", causal=True)
    out, lse = step10_variants.attention(q, k, v, True)
    gradients = step10_variants.backward(q, k, v, out, lse, dout, True, deterministic=True, workers=2)
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))
    assert compare({name: x[None, None] for name, x in found.items()}, case)[0].ok


@needs_compiler
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", CPP)
def test_cpp_against_the_oracle(name: str, causal: bool) -> None:
    for kind in KINDS:
        case, tensors = problem(CPP[name], kind, causal=causal)
        check(CPP[name], case, tensors, causal=causal)


@pytest.mark.parametrize("name", ["online", "autograd", "floats", "standard", "flash1", "flash2", "variants"])
def test_scale(name: str) -> None:
    case, tensors = problem(RUNS[name], "normal", scale=-0.4)
    check(RUNS[name], case, tensors, scale=-0.4)


@needs_compiler
def test_scale_in_cpp() -> None:
    case, tensors = problem(CPP["raw -O2"], "normal", scale=-0.4)
    check(CPP["raw -O2"], case, tensors, scale=-0.4)


# Step 1 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_naive_softmax_overflows_and_the_others_do_not(dtype: torch.dtype) -> None:
    largest = math.log(torch.finfo(dtype).max)
    fits = torch.tensor([largest - 2, 0.0, -3.0], dtype=dtype)
    overflows = fits + 4
    assert step01_softmax.naive_softmax(fits).isfinite().all()
    assert step01_softmax.naive_softmax(overflows).isnan().any()
    for softmax in SOFTMAXES:
        torch.testing.assert_close(softmax(overflows), torch.softmax(overflows, 0))
    underflows = torch.tensor([-200.0, -150.0, -120.0]) - (650 if dtype is torch.float64 else 0)
    assert step01_softmax.naive_softmax(underflows.to(dtype)).isnan().all()
    for softmax in SOFTMAXES:
        assert softmax(underflows.to(dtype)).sum() == pytest.approx(1)


def test_a_published_example_of_softmax() -> None:
    """Scores 1 2 3 4, as the page has them."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    for softmax in (step01_softmax.naive_softmax, *SOFTMAXES):
        assert [f"{p:.7f}" for p in softmax(x).tolist()] == ["0.0320586", "0.0871443", "0.2368828", "0.6439143"]


SOFTMAXES: tuple[Callable[[Tensor], Tensor], ...] = (
    step01_softmax.safe_softmax,
    step01_softmax.online_softmax,
    step01_softmax.blockwise_softmax,
)


@pytest.mark.parametrize("softmax", SOFTMAXES, ids=lambda f: f.__name__)
def test_softmaxes(softmax: Callable[[Tensor], Tensor]) -> None:
    for n in (1, 2, 4, 5, 23):
        for x in (torch.randn(n), torch.linspace(-50, 50, n), torch.linspace(50, -50, n), torch.full((n,), 1e4)):
            torch.testing.assert_close(softmax(x.double()), torch.softmax(x.double(), 0))


def test_merge_is_associative_and_commutative() -> None:
    """In any grouping and order, the sum of exp over the union: exactly but for rounding, in fp64."""
    x = 20 * torch.randn(12, dtype=torch.float64)
    parts = [step01_softmax.normalizer(part) for part in x.split(3)]
    merge = step01_softmax.merge
    for a, b, c, d in itertools.permutations(parts):
        for found in (
            merge(merge(merge(a, b), c), d),
            merge(a, merge(b, merge(c, d))),
            merge(merge(a, b), merge(c, d)),
        ):
            assert found.m == x.max()
            torch.testing.assert_close(found.m + found.l.log(), torch.logsumexp(x, 0), rtol=1e-14, atol=0)


def test_attention_in_passes() -> None:
    for causal in (False, True):
        case, (q, k, v, _) = problem(RUNS["online"], "outliers", causal=causal)
        out, lse = step01_softmax.attention_in_passes(q, k, v, causal)
        assert compare({"out": out[None, None], "lse": lse[None, None]}, case)[0].ok


# Step 2 --------------------------------------------------------------------------------------------------------------


def test_values_add_up_the_gradients_of_all_their_uses() -> None:
    (a, b), rows = step02_autograd.values([[3.0, 2.0]])[0], step02_autograd.values([[0.0]])
    y = (a * b + a) / b - a.exp().log()  # a appears four times; y = a / b
    step02_autograd.backward([[a]], [[b]], rows, [[y]], [y], [[1.0]])
    assert a.grad == pytest.approx(1 / 2)
    assert b.grad == pytest.approx(-3 / 4)
    step02_autograd.backward([[a]], [[b]], rows, [[y]], [y], [[2.0]])
    assert a.grad == pytest.approx(1), "gradients start from 0 again"


# Step 3 --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_library() -> Any:
    step03_cpp.library.cache_clear()
    yield
    step03_cpp.library.cache_clear()


@pytest.mark.usefixtures("fresh_library")
def test_without_a_compiler_step_3_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert step03_cpp.compiler() is None
    with pytest.raises(step03_cpp.CompilerError, match="found no compiler: install one"):
        step03_cpp.attention(*(torch.randn(3, 4) for _ in range(3)))


@needs_compiler
@pytest.mark.usefixtures("fresh_library")
def test_a_compiler_that_fails_is_quoted() -> None:
    with pytest.raises(step03_cpp.CompilerError, match="no-such-flag"):
        step03_cpp.attention(*(torch.randn(3, 4) for _ in range(3)), flags=("--no-such-flag",))


def test_step_3_refuses_what_it_would_misread() -> None:
    q = torch.randn(3, 4)
    with pytest.raises(TypeError, match="float64"):
        step03_cpp.attention(q, q, q.double())
    with pytest.raises(ValueError, match="shape"):
        step03_cpp.attention(q, q[:2], q)


# Step 5: the loop alone, masks and dropout ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4, 9])
def test_flash1_without_options(n: int) -> None:
    """It is attention, with partial blocks too; and its body has fifteen lines at most, which the page shows."""
    q, k, v = (10 * torch.randn(n, 3, dtype=torch.float64) for _ in range(3))
    torch.testing.assert_close(step05_flash1.plain(q, k, v), torch.softmax(q @ k.mT / math.sqrt(3), 1) @ v)
    source = inspect.getsource(step05_flash1.plain)
    body = source.partition('first."""\n')[2].splitlines()
    assert len(body) <= 15
    page = (Path(__file__).parents[1] / "docs" / "ladder.md").read_text(encoding="utf-8")
    assert "\n".join(body[1:]) in page


def test_calls_of_torch_for_each_tile() -> None:
    """What steps 5 and 6 say of their loops, views left out: by calls with one block of keys more."""

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += not any(word in str(func) for word in ("slice", "select", "unsqueeze", "transpose"))
            return func(*args, **(kwargs or {}))

    def calls(attention: Any, **sizes: int) -> int:
        with Count() as found:
            attention(*torch.randn(3, 128, 64), **sizes)
        return found.calls

    two, one = (calls(step06_flash2.attention, block_n=n) for n in (64, 128))
    assert two - one == 13
    four, two = (calls(step05_flash1.attention, memory=4 * 64 * keys) for keys in (64, 128))
    assert 28 <= (four - two) / 2 <= 33


def test_flash1_mask() -> None:
    """Over tiles that a mask hides in part, whole rows of it too: such rows give 0, -inf and no gradient."""
    run = RUNS["flash1"]
    mask = torch.rand(run.seqlen, run.seqlen) < 0.5
    mask[:, 48:96] = False
    mask[7] = mask[129] = False
    for causal in (False, True):
        case, tensors = problem(run, "normal", causal=causal, mask=mask[None, None])
        check(run, case, tensors, causal=causal, mask=mask)


def test_flash1_dropout() -> None:
    """With V the identity, out is the dropped P: that shows which pairs are kept. Then any V, and the gradients."""
    n, p = 24, 0.3
    q, k, v, dout = (torch.randn(n, n, dtype=torch.float64, requires_grad=True) for _ in range(4))
    dropout = {"dropout_p": p, "rng_state": torch.Generator().manual_seed(3).get_state(), "memory": 4 * n * 5}
    for causal in (False, True):
        with torch.no_grad():
            dropped, lse = step05_flash1.attention(q, k, torch.eye(n, dtype=torch.float64), causal, **dropout)
            plain, plain_lse = step05_flash1.attention(
                q, k, torch.eye(n, dtype=torch.float64), causal, memory=4 * n * 5
            )
        visible = torch.ones(n, n).tril() > 0 if causal else torch.ones(n, n) > 0
        factors = torch.where(visible, dropped / plain, 0.0)
        assert torch.equal(lse, plain_lse), "dropout acts on normalised weights"
        torch.testing.assert_close(factors, torch.where(factors > 0, 1 / (1 - p), 0.0).double())
        assert 0.2 < float((factors[visible] == 0).double().mean()) < 0.4
        assert len({tuple(row.tolist()) for row in factors}) == n, "every row has its own"

        s = (q @ k.mT / math.sqrt(n)).masked_fill(~visible, -math.inf)
        expected = (torch.softmax(s, 1) * factors) @ v
        with torch.no_grad():
            out, lse = step05_flash1.attention(q, k, v, causal, **dropout)
            found = step05_flash1.backward(q, k, v, out, lse, dout, causal, **dropout)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(found, torch.autograd.grad(expected, (q, k, v), dout))


def test_flash1_dropout_needs_a_state() -> None:
    q = torch.randn(3, 4)
    with pytest.raises(TypeError, match="rng_state"):
        step05_flash1.attention(q, q, q, dropout_p=0.5)


# Step 7 --------------------------------------------------------------------------------------------------------------

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="Numba is not installed")
NUMBA = {
    "numba": Run("step07_numba", 130, backward=False),
    "numba, short": Run("step07_numba", 9, backward=False),
    "numba fp64": Run("step07_numba", 130, double, backward=False),
}


@needs_numba
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", NUMBA)
def test_numba_against_the_oracle(name: str, causal: bool) -> None:
    for kind in KINDS:
        case, tensors = problem(NUMBA[name], kind, causal=causal)
        check(NUMBA[name], case, tensors, causal=causal)
    case, tensors = problem(NUMBA[name], "normal", scale=-0.4)
    check(NUMBA[name], case, tensors, scale=-0.4)


@needs_numba
def test_numba_for_cuda_in_the_simulator(tmp_path: Path) -> None:
    """Over partial blocks, with the barriers that it needs: the simulator runs threads as threads."""
    given = [problem(Run("", n), kind, causal=causal) for n, kind, causal in NUMBA_CUDA]
    calls = [
        ("step07_numba_cuda", dict(zip("qkv", tensors[:3], strict=True)) | {"causal": case.arguments["causal"]})
        for case, tensors in given
    ]
    results = run_simulated(calls, tmp_path, NUMBA_ENABLE_CUDASIM="1")
    for (case, _), (out, lse) in zip(given, results, strict=True):
        case.forward_only = True
        worst = compare({"out": out[None, None], "lse": lse[None, None]}, case)[0]
        assert worst.ok, worst


NUMBA_CUDA = ((1, "normal", False), (33, "normal", False), (33, "ramp", True), (64, "outliers", True))


@needs_numba
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_numba_for_cuda_on_a_gpu() -> None:
    """And its private arrays are registers: none of them lies in local memory."""
    module = step("step07_numba_cuda")
    for n, causal in ((1, False), (33, True), (129, False), (200, True)):
        q, k, v = torch.randn(3, n, 64, device="cuda")
        out, lse = module.attention(q, k, v, causal)
        expected = step("step04_standard").attention(q.double(), k.double(), v.double(), causal)
        torch.testing.assert_close(out.double(), expected[0], rtol=0, atol=5e-6)
        torch.testing.assert_close(lse.double(), expected[1], rtol=0, atol=5e-6)
    local = module.kernel(64).get_local_mem_per_thread()
    assert set(local.values()) == {0}


@pytest.mark.parametrize("module", ["step07_numba", "step07_numba_cuda"])
def test_without_numba_step_7_says_so(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step07 = step(module)
    step07_numba.compiled.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(step07_numba.NumbaUnavailableError, match="`pip install numba`"):
        step07.attention(*torch.randn(3, 5, 4))


def test_numba_for_cuda_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step("step07_numba_cuda"), "require_numba", lambda: None)
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    with pytest.raises(step07_numba.NumbaUnavailableError, match="NUMBA_ENABLE_CUDASIM=1 before Python starts"):
        step("step07_numba_cuda").attention(*torch.randn(3, 5, 4))


# Step 10 -------------------------------------------------------------------------------------------------------------

FEATURES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"window": (70, 3)}, {}),
    ({"window": (5, 0)}, {}),
    ({"window": (0, 90), "causal": True}, {}),
    ({"softcap": 1.5}, {}),
    ({"alibi_slope": 0.3}, {"alibi_slopes": torch.tensor([0.3])}),
    ({"window": (65, 9), "softcap": 2.0, "alibi_slope": 0.1}, {"alibi_slopes": torch.tensor([0.1])}),
)


@pytest.mark.parametrize("seqlen", [1, 64, 150, 192])
@pytest.mark.parametrize("features", FEATURES, ids=lambda x: "-".join(x[0]))
def test_variants(features: tuple[dict[str, Any], dict[str, Any]], seqlen: int) -> None:
    given, tensors = features
    run = Run("step10_variants", seqlen)
    arguments = {name: value for name, value in given.items() if name != "alibi_slope"} | tensors
    case, qkv = problem(run, "normal", **arguments)
    check(run, case, qkv, **given)


def test_a_variant_has_the_lines_of_its_features_alone() -> None:
    features = step10_variants.Features
    plain = step10_variants.source(features())
    assert not any(word in plain for word in ("masked_fill", "tanh", "slope", "keep_factors", "padded"))
    for name in features._fields:
        longer = step10_variants.source(features(**{name: True})).splitlines()
        assert set(plain.splitlines()) < set(longer), name
    everything = step10_variants.source(features(*[True] * len(features._fields)))
    assert everything.splitlines() == [line.partition("  #: ")[0] for line in step10_variants.LINES.splitlines()]
    backward = step10_variants.source(features(), step10_variants.BACKWARD_LINES)
    assert not any(word in backward for word in ("masked_fill", "tanh", "slope", "keep_factors"))


def test_a_variant_is_compiled_once() -> None:
    step10_variants.variant.cache_clear()
    for n, softcap in ((64, 1.0), (128, 2.0), (192, 3.0), (65, 1.0), (66, 1.0)):
        step10_variants.attention(*(torch.randn(n, 4) for _ in range(3)), softcap=softcap)
    assert step10_variants.variant.cache_info().misses == 2  # even and uneven lengths


def test_variant_dropout() -> None:
    """As for step 5; and the factors do not depend on the length, which changes the tiles' padding."""
    n, p = 100, 0.3
    q, k, v = (torch.randn(n, n, dtype=torch.float64) for _ in range(3))
    eye = torch.eye(n, dtype=torch.float64)
    plain, lse = step10_variants.attention(q, k, eye)
    dropped, dropped_lse = step10_variants.attention(q, k, eye, dropout_p=p, seed=5)
    assert torch.equal(lse, dropped_lse)
    factors = dropped / plain
    assert torch.equal(factors > 0.5, step10_variants.keep_factors(5, *step10_variants_positions(n), p) > 0)
    torch.testing.assert_close(factors, torch.where(factors > 0.5, 1 / (1 - p), 0.0).double())
    assert 0.27 < float((factors < 0.5).double().mean()) < 0.33
    out, _ = step10_variants.attention(q, k, v, dropout_p=p, seed=5)
    torch.testing.assert_close(out, dropped @ v)
    other, _ = step10_variants.attention(q, k, v, dropout_p=p, seed=6)
    assert not torch.allclose(out, other)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    weights = torch.softmax(leaves[0] @ leaves[1].mT / math.sqrt(q.shape[1]), 1)
    expected = torch.autograd.grad((weights * (factors > 0.5) / (1 - p)) @ leaves[2], leaves, v)
    found = step10_variants.backward(q, k, v, out, lse, v, dropout_p=p, seed=5, deterministic=True)
    torch.testing.assert_close(found, expected)


def step10_variants_positions(n: int) -> tuple[Tensor, Tensor]:
    return torch.arange(n)[:, None], torch.arange(n)


def test_a_deterministic_backward_does_not_depend_on_who_comes_first() -> None:
    q, k, v, dout = (torch.randn(320, 16) for _ in range(4))
    out, lse = step10_variants.attention(q, k, v)
    orders = [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3), (1, 4, 0, 3, 2)]

    def bits(deterministic: bool) -> int:
        """How many different dq come out."""
        found = [
            step10_variants.backward(q, k, v, out, lse, dout, deterministic=deterministic, workers=2, arrival=order)[0]
            for order in orders
        ]
        return len({x.numpy().tobytes() for x in found})

    assert bits(deterministic=False) > 1
    assert bits(deterministic=True) == 1


# Shapes --------------------------------------------------------------------------------------------------------------

OTHER_FILES: dict[str, Callable[..., Any]] = {
    "softmax passes": softmax_passes.attention,
    "stream-K": stream_k.attention,
    "unified max": unified_max.attention,
    "tiles without softmax": lambda q, k, v: tiled_matmul.chained(q, k, v, 4),
}


@pytest.mark.parametrize("name", [*RUNS, *OTHER_FILES])
def test_keys_of_another_length_are_refused(name: str) -> None:
    """A loop over the rows of q would leave keys out without a word."""
    q, keys = torch.randn(7, 4), torch.randn(9, 4)
    if name in OTHER_FILES:
        with pytest.raises(ValueError, match=r"\(7, 4\), \(9, 4\)"):
            OTHER_FILES[name](q, keys, keys)
        return
    run = RUNS[name]
    for k, v in ((keys, keys), (q, keys), (q[:, :2], q)):
        with pytest.raises(ValueError, match="one shape"):
            run.results(q, k, v, q)
    if run.backward and run.module != "step02_autograd":  # whose graph knows its leaves
        module = step(run.module)
        rows = (lambda x: x.tolist()) if run.module == "step02_floats" else (lambda x: x)
        with pytest.raises(ValueError, match="one shape"):
            module.backward(rows(q), rows(keys), rows(keys), rows(q), rows(q[:, 0]), rows(q))
