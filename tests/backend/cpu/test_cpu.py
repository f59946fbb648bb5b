"""The CPU backend: the contract on every vector width, tails, threads, processes, the cache of machine code."""

import ctypes
import importlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from blind import BLIND
from checking import assert_right, dense_case, features, groups_of_features, offsets
from hypothesis import given, settings
from hypothesis import strategies as st

import flashtile
from flashtile import BackendError
from flashtile.backend import user_files
from flashtile.backend.user_files import CACHE_VARIABLE
from flashtile.call.call import Call, Settings, Tensors
from flashtile.testing.case import Case
from flashtile.testing.generate import random_case
from flashtile.testing.inputs import KINDS
from flashtile.testing.layouts import LAYOUTS, lay_out
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

arguments, backward, forward, tangents, jit, targets, threads, variants = (
    importlib.import_module(f"flashtile.backend.cpu.{name}")
    for name in (
        "arguments", "kernels.backward", "kernels.forward", "kernels.tangents", "jit", "targets", "threads", "variant",
    )
)  # fmt: skip
support = importlib.import_module("flashtile.backend.cpu.support")
FEATURES = features()
WIDTHS = ("avx512", "avx2", "baseline")
INF, NAN = torch.inf, torch.nan


def usable(width: str) -> bool:
    with mock.patch.dict(os.environ, {targets.VECTORS_VARIABLE: width}):
        try:
            return targets.host() is not None
        except BackendError:
            return False


def request_width(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not usable(width):
        pytest.skip(f"this processor has no {width}")
    monkeypatch.setenv(targets.VECTORS_VARIABLE, width)


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    request_width(request.param, monkeypatch)
    return request.param


def right(case: Case) -> None:
    assert_right(case, "cpu")


def right_or_declined(case: Case) -> None:
    widths = [x.shape[-1] for name, x in case.arguments.items() if name in ("q", "v", "v_cache")]
    if max(widths) > support.MAX_HEAD_DIM:
        with pytest.raises(BackendError, match="head dimensions"):
            case.run("cpu")
    else:
        right(case)


# The contract ---------------------------------------------------------------------------------------------------------


@settings(max_examples=8)  # as each compiles kernels; `flashtile report`, a part of the checks, takes twenty more
@given(seed=st.integers(0, 2**32 - 1), function=st.sampled_from(["attention", "attention_varlen"]))
def test_random_calls(seed: int, function: str) -> None:
    right_or_declined(random_case(seed, function=function))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_calls_with_a_cache(seed: int) -> None:
    right_or_declined(random_case(seed, function="attention_with_kvcache"))


# In pairs without mask functions, as a formula compiles slowly.
GROUPS = groups_of_features({name: x for name, x in FEATURES.items() if name != "mask function"}, size=6)


@pytest.mark.parametrize("names", [*((name,) for name in FEATURES), *GROUPS], ids=", ".join)
def test_feature_alone_and_with_every_other(names: tuple[str, ...]) -> None:
    """Each pair of features is in one of the groups, whose kernels take a third of the time of those of all pairs."""
    right(dense_case(**{key: x for name in names for key, x in FEATURES[name].items()}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_inputs_on_every_width(dtype: torch.dtype, width: str) -> None:
    for kind, seed in itertools.product(KINDS, range(6)):  # the adversarial kind has six patterns
        right(dense_case(seqlen_q=70, seqlen_k=101, head_dim=33, dtype=dtype, kind=kind, seed=seed, causal=True))


def test_every_feature_on_every_width(width: str) -> None:
    """All features in one call, with full, partly visible and hidden blocks, in float32 and a half precision."""
    half = (torch.float16, 1) if width == "avx2" else (torch.bfloat16, 150)
    for dtype, vectors in ((torch.float32, 150), half):
        given = {
            "window": (40, 30),
            "mask": torch.rand(2, 1, vectors, 230) < 0.7,
            "bias": torch.randn(1, 4, vectors, 230).to(dtype),
            "alibi_slopes": torch.rand(2, 4),
            "sinks": torch.randn(4),
            "softcap": 2.0,
            "dropout_p": 0.3,
            "dropout_seed": 7,
        }
        shape = {"num_heads_q": 4, "num_heads_kv": 2, "seqlen_q": vectors, "seqlen_k": 230}
        right(dense_case(**shape, head_dim=40, head_dim_v=24, dtype=dtype, **given))


@pytest.mark.parametrize("visibility", [{}, {"causal": True}, {"window": (5, 3)}], ids=str)
def test_tails(visibility: dict[str, Any]) -> None:
    """Every remainder of rows, keys and head dimensions modulo a vector, and of keys and features modulo the height of
    a microkernel.
    """
    for n in range(1, 34):
        right(dense_case(batch=1, seqlen_q=n, seqlen_k=97 + n, head_dim=n, head_dim_v=34 - n, **visibility))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 32), (24, 48), (32, 24)])
def test_panels_of_every_width(head_dim: int, head_dim_v: int) -> None:
    """The last rows of a sequence in one vector, in two and in more, beside none, one and two full panels of 64 rows,
    with vectors of 4, 8 and 16 lanes; products with lanes of features and of rows; a bias whose gradient is a sum over
    rows.
    """
    for rows, bias in ((3, True), (17, False), (41, True), (80, False), (105, True), (133, True)):
        given = {"bias": torch.randn(1, 1, 1, 99)} if bias else {"causal": True}
        right(dense_case(num_heads_kv=2, seqlen_q=rows, seqlen_k=99, head_dim=head_dim, head_dim_v=head_dim_v, **given))


def test_head_dimensions() -> None:
    for head_dim, head_dim_v in ((1, 512), (512, 1), (256, 128)):
        right(dense_case(seqlen_q=70, seqlen_k=100, head_dim=head_dim, head_dim_v=head_dim_v, causal=True))


@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_scores_whose_terms_are_all_alike(head_dim: int) -> None:
    """Forward and backward add them in different orders. Long sums of equal terms round in one direction."""
    for value in (3.0, 6.0, 7.3):
        q, k = torch.full((1, 6, 2, head_dim), value), torch.full((1, 3, 2, head_dim), value)
        slopes = torch.linspace(0.1, 0.9, 6)
        arguments = {"q": q, "k": k, "v": torch.randn(1, 3, 2, head_dim), "causal": True, "alibi_slopes": slopes}
        dout, dlse = torch.randn(1, 6, 2, head_dim), torch.randn(1, 6, 2)
        case = Case("attention", arguments, dout, dlse, 0)
        assert all(deviation.ok for deviation in compare(case.run("cpu"), case))


def test_strides() -> None:
    for name, layout, dtype in itertools.product("qkv", LAYOUTS, (torch.float32, torch.bfloat16)):
        case = dense_case(dtype=dtype)
        case.arguments[name] = lay_out(case.arguments[name], layout, random.Random(layout))
        right(case)


@pytest.mark.parametrize("which", ["mask", "bias"])
def test_every_broadcast_and_stride_of_mask_and_bias(which: str) -> None:
    for kept, turned in itertools.product(itertools.product((False, True), repeat=4), (False, True)):
        shape = [n if keep else 1 for n, keep in zip((2, 2, 20, 40), kept, strict=True)]
        given = torch.randn(shape[::-1]).permute(3, 2, 1, 0) if turned else torch.randn(shape)
        right(dense_case(seqlen_q=20, seqlen_k=40, **{which: given > -0.7 if which == "mask" else given}))


def test_gradients_of_shared_tensors() -> None:
    """Biases with every set of broadcast dimensions, with split keys where elements are not shared; batched slopes."""
    for kept in itertools.product((False, True), repeat=4):
        shape = [n if keep else 1 for n, keep in zip((2, 4, 70, 800), kept, strict=True)]
        given = {"bias": torch.randn(shape), "alibi_slopes": torch.rand(2, 4) * 0.1}
        shape = {"num_heads_q": 4, "num_heads_kv": 2, "seqlen_q": 70, "seqlen_k": 800, "head_dim": 20}
        right(dense_case(**shape, **given, softcap=3.0, sinks=torch.randn(4)))


def test_only_the_gradients_that_are_asked_for() -> None:
    case = dense_case(**FEATURES["bias"] | FEATURES["sinks"] | FEATURES["alibi_slopes"], seqlen_q=7, seqlen_k=9)
    every = case.run("cpu")
    for name in ("q", "k", "v", "bias", "sinks", "alibi_slopes"):
        leaf = case.arguments[name].detach().requires_grad_()
        out, lse = flashtile.attention(**case.arguments | {name: leaf}, return_lse=True, backend="cpu")
        (found,) = torch.autograd.grad((out, lse), leaf, (case.dout, case.dlse))
        assert torch.equal(found, every[f"d{name}"])


def test_gradients_of_results_that_differ_in_strides_alone() -> None:
    """A cached launch serves calls of the same strides only."""
    leaves = [torch.randn(2, 4, 33, 16, requires_grad=True) for _ in range(3)]
    for seen in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        out = flashtile.attention(*(seen(x) for x in leaves), causal=True, backend="cpu")
        dout = torch.randn(2, 1, 1, 16).expand(out.shape)
        douts = dout, dout.contiguous(), dout.transpose(1, 3).contiguous().transpose(1, 3)
        first, *others = (torch.autograd.grad(out, leaves, dout, retain_graph=True) for dout in douts)
        assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


def test_pages_that_sequences_share() -> None:
    pages = {"k": torch.randn(5, 4, 2, 8), "v": torch.randn(5, 4, 2, 8), "cu_seqlens_k": None}
    table = torch.tensor([[0, 3, 1], [3, 4, 0]], dtype=torch.int32)
    given = {"q": torch.randn(9, 4, 8), "cu_seqlens_q": offsets(4, 5), "page_table": table}
    given |= pages | {"seqused_k": torch.tensor([11, 7], dtype=torch.int32), "causal": True}
    right(Case("attention_varlen", given, torch.randn(9, 4, 8), torch.randn(4, 9)))


def test_long_sequences() -> None:
    """Several panels in a task, several key blocks, hidden blocks between visible ones."""
    for visibility in ({}, {"causal": True}, {"window": (100, 50)}, {"causal": "top_left"}):
        right(dense_case(batch=1, seqlen_q=1100, seqlen_k=900, head_dim=16, **visibility))


def test_few_rows_split_the_keys() -> None:
    for sinks, dtype in itertools.product((None, torch.tensor([1.0, -INF, INF, 9.0])), (torch.float32, torch.bfloat16)):
        shape = {"batch": 1, "num_heads_q": 4, "num_heads_kv": 2, "seqlen_q": 3, "seqlen_k": 5000}
        right(dense_case(**shape, dtype=dtype, causal=True, **({} if sinks is None else {"sinks": sinks})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_few_rows_of_several_blocks(dtype: torch.dtype, width: str) -> None:
    """The decode kernel's packed scores: heads with sinks, or positions whose first and last blocks are not packed;
    maxima that change between blocks, infinities, numbers of rows and keys that fill no vector; features that fill
    narrower vectors than the processor's.
    """
    for rows, bad in itertools.product(range(1, 6), (None, INF)):
        sinks = torch.linspace(-9, 9, rows)
        heads = {"num_heads_q": rows, "seqlen_q": 1, "seqlen_k": 290 - rows, "sinks": sinks}
        positions = {"num_heads_q": 1, "seqlen_q": rows, "seqlen_k": 290 - rows, "window": (200, 20)}
        for shape in (heads, positions):
            head_dim = 24 if rows in (1, 3) else 16
            case = dense_case(**shape, batch=1, head_dim=head_dim, dtype=dtype, seed=rows, forward_only=True)
            case.arguments["k"] *= torch.linspace(-3, 3, 290 - rows)[:, None].to(dtype)
            if bad is not None:
                case.arguments["k"][:, :, 150, 3] = bad
            right(case)


def test_decoding_has_vectors_that_features_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "host", lambda: targets.make_target("avx512"))

    def width(head_dim: int, rows: int, dtype: torch.dtype = torch.float32) -> int | None:
        q, k = torch.empty(1, rows, 1, head_dim, dtype=dtype), torch.empty(1, 1, 9, head_dim, dtype=dtype)
        tile = support.TileConfig(rows, 96)
        target = arguments.decode_target(Call(Tensors(q, k, k), Settings(scale=1.0)), tile)
        return None if target is None else target.vector_bytes

    assert [width(64, rows) for rows in (1, 8, 9)] == [64, 64, None]
    assert [width(40, rows) for rows in (1, 4, 5)] == [32, 32, None]
    assert [width(20, rows) for rows in (2, 3)] == [16, None]
    assert width(30, 1) is None
    assert width(20, 2, torch.float64) == 32


@pytest.mark.parametrize("sinks", [None, (0.5, -INF)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("cause", BLIND)
def test_rows_that_see_nothing(cause: str, sinks: tuple | None) -> None:
    right(dense_case(**BLIND[cause] | ({} if sinks is None else {"sinks": torch.tensor(sinks)})))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_and_infinities(name: str, width: str) -> None:
    for bad, (row, feature) in itertools.product((NAN, INF, -INF), ((0, 0), (5, 3), (6, 7))):
        case = dense_case(seqlen_q=7, seqlen_k=9, causal=True, forward_only=True)
        case.arguments[name][:, 0, row, feature] = bad
        right(case)


def test_extreme_scores_and_sinks() -> None:
    """Infinite biases and sinks, and `finfo.min`, a common bias for hidden pairs."""
    lowest = torch.finfo(torch.float32).min
    for value, sink in itertools.product((INF, -INF, lowest, NAN), (None, INF, -INF)):
        bias = torch.randn(1, 1, 7, 9)
        bias[..., 2, 3], bias[..., 4, :] = value, value
        sinks = {} if sink is None else {"sinks": torch.tensor([sink, 0.0])}
        right(dense_case(bias=bias, forward_only=True, **sinks))


def test_results_do_not_depend_on_what_memory_held() -> None:
    given = FEATURES["window"] | FEATURES["dropout"]
    for sizes in (
        {"seqlen_q": 7, "seqlen_k": 9} | FEATURES["mask"],
        {"seqlen_q": 0},
        {"seqlen_q": 300, "head_dim": 13},
        {"seqlen_q": 69, "head_dim": 32, "bias": torch.randn(1, 1, 1, 1100)},
    ):
        case = dense_case(**{"seqlen_k": 1100} | given | sizes)
        clean = case.run("cpu")
        with poisoned_allocation():
            poisoned = case.run("cpu")
        assert all(torch.equal(clean[name], x) for name, x in poisoned.items())


def test_packed_sequences_and_tokens_of_none() -> None:
    cu_q, cu_k = offsets(100, 0, 3, 70), offsets(90, 5, 0, 130)
    q, k, v = torch.randn(180, 4, 40), torch.randn(230, 2, 40), torch.randn(230, 2, 24)
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": True}
    right(Case("attention_varlen", given, torch.randn(180, 4, 24), torch.randn(4, 180)))


# Memory outside of tensors --------------------------------------------------------------------------------------------


def run_guarded(*words: str) -> subprocess.CompletedProcess:
    program = [sys.executable, str(Path(__file__).parents[2] / "support" / "guarded.py"), *words]
    return subprocess.run(program, capture_output=True, text=True, check=False)


# Compilation takes most of the time: each dtype meets two widths, and float32, with the most residues, the widths that
# differ in it.
GUARDED = {
    "avx512": ("float32", "bfloat16", "float64"),
    "avx2": ("float32", "float16"),
    "baseline": ("float32", "float16", "float64"),
    "amx-emulated": ("bfloat16",),
}


@pytest.mark.parametrize("width", GUARDED)
def test_nothing_is_touched_outside_of_tensors(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random calls in a process of their own, with every tensor between protected pages; and calls of every
    residue of rows, keys and head dimensions, forward and backward, whose inputs lie among NaN.
    """
    request_width(width, monkeypatch)
    first = 1000 * list(GUARDED).index(width)
    process = run_guarded(str(first), str(first + 2), *GUARDED[width])
    assert process.returncode == 0, process.stdout.splitlines()[-1:] + process.stderr.splitlines()[-3:]
    calls = sum(96 if dtype == "float32" else 32 for dtype in GUARDED[width])
    assert len(process.stdout.splitlines()) >= 2 + 2 * calls


def test_the_guard_would_notice() -> None:
    """A kernel that is told of one key too many ends the process."""
    code = (
        "import importlib, torch, guarded, flashtile; from unittest import mock;"
        "from flashtile.backend.cpu import lengths as a; lengths = a.dense_lengths;"
        "wrong = lambda b, q, k, *rest: lengths(b, q, k + 1, *rest);"
        "q = guarded.guarded(torch.randn(1, 1, 8, 1024 // 4 * 2), False);"
        "mock.patch.object(a, 'dense_lengths', wrong).start();"
        "flashtile.attention(q, q, q, backend='cpu')"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=environment)
    assert process.returncode in (-signal.SIGSEGV, -signal.SIGBUS)


# Threads and processes ------------------------------------------------------------------------------------------------


@contextmanager
def num_threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


CALLS = [
    dense_case(seqlen_q=300, seqlen_k=600, head_dim=24, causal=True, dropout_p=0.2, dropout_seed=3),
    dense_case(batch=1, num_heads_q=4, seqlen_q=1, seqlen_k=4000, head_dim=24),  # split over keys
]


@pytest.mark.parametrize("openmp", [True, False], ids=["OpenMP", "own threads"])
def test_same_bits_on_any_number_of_threads(openmp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not openmp:
        monkeypatch.setattr(threads, "openmp", lambda: None)
    for case in CALLS:
        results = []
        for n in (1, 2, 3):
            with num_threads(n):
                results.append(case.run("cpu"))
        assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in other)


def test_calls_from_several_python_threads() -> None:
    expected = [case.run("cpu") for case in CALLS]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda n: CALLS[n % 2].run("cpu"), range(24)))
    for n, result in enumerate(results):
        assert all(torch.equal(result[name], expected[n % 2][name]) for name in result)


FORKING = """
import os, signal, sys, numpy, torch, flashtile
from torch.utils.data import DataLoader

def results():  # arrays, for operations on large tensors would hang; so do those inside of a call
    found = []
    for backend in "cpu", "tiled":
        leaves = [x.detach().requires_grad_() for x in (q, q, q)]
        out = flashtile.attention(*leaves, backend=backend)
        found += [out, *torch.autograd.grad(out, leaves, q)]
    return [x.detach().numpy() for x in found]

class Results(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, n):
        signal.alarm(20)
        torch.set_num_threads(2)  # as PyTorch's workers do not, but users may
        return same(results(), expected) and torch.get_num_threads() == 2

def same(*found):
    return all(numpy.array_equal(x, y) for x, y in zip(*found, strict=True))

torch.set_num_threads(2)
q = torch.randn(1, 4, 300, 64).bfloat16().float()
expected = results()
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if same(results(), expected) and torch.get_num_threads() == 2 else 1)
assert os.waitpid(child, 0)[1] == 0
assert same(results(), expected)
assert list(DataLoader(Results(), num_workers=1, batch_size=None, multiprocessing_context="fork")) == [True, True]
"""


def test_forked_processes_answer() -> None:
    """A forked process runs on one thread: a parallel region would wait forever for threads of the parent."""
    process = subprocess.run([sys.executable, "-c", FORKING], timeout=60, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("AttentionWarning: attention runs on one thread in a forked process") == 2


def test_threads_are_those_of_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels use PyTorch's OpenMP library, even if another package has loaded its own: two have twice the threads."""
    with open("/proc/self/maps") as maps:
        path = next((line.split()[-1] for line in maps if "/libgomp" in line), None)
    if path is None:
        pytest.skip("PyTorch has another OpenMP library")
    other = ctypes.CDLL(shutil.copy(path, tmp_path / "libgomp-0.so"))
    monkeypatch.setattr(threads, "openmp", threads.openmp.__wrapped__)
    found, unwanted = (ctypes.cast(x, ctypes.c_void_p).value for x in (threads.openmp(), other.GOMP_parallel))
    assert found is not None
    assert found != unwanted


def test_the_argument_block_has_no_other_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelled field would be appended behind the block, and the right one would stay 0."""
    strides = arguments.lse_strides
    monkeypatch.setattr(arguments, "lse_strides", lambda *given: strides(*given) | {"lse_stride": 1})
    with pytest.raises(AssertionError, match="lse_stride"):
        dense_case(seqlen_k=11).run("cpu")


# Machine code ---------------------------------------------------------------------------------------------------------

VARIANT = arguments.Variant("float32", 1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(jit, "_PARTS", {})
    return tmp_path / "cpu"


def source() -> Any:
    return forward.source(VARIANT, targets.host())


def load() -> int:
    return jit.function_address(variants.FORWARD, VARIANT, targets.host(), source)


def never(*_: Any) -> Any:
    raise AssertionError("it compiled")


def test_object_files_are_used_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load()
    assert len(list(cache.iterdir())) == len(source().texts())
    monkeypatch.setattr(jit, "compile_object", never)
    monkeypatch.setattr(forward, "source", never)
    assert load()


def test_kernels_share_parts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel of the same dtype compiles what is its own, in this process and in one that finds the files."""
    load()
    compiled, compile_object = [], jit.compile_object
    monkeypatch.setattr(jit, "compile_object", lambda *given: compiled.append(given) or compile_object(*given))
    for n, known in enumerate((jit._PARTS, {})):
        monkeypatch.setattr(jit, "_PARTS", known)
        other, host = VARIANT._replace(softcap=n == 0, dropout=n == 1), targets.host()
        assert jit.function_address(variants.FORWARD, other, host, lambda x=other: forward.source(x, targets.host()))
        assert len(compiled) == n + 1


def test_other_generators_have_other_object_files(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash of the sources is part of an object file's name, and nothing is stored if sources changed since."""
    copied = cache.parent / "package"
    shutil.copytree(jit.PACKAGE, copied)
    assert jit.hash_sources(copied) == jit.SOURCES_HASH
    copied.joinpath("kernels", "scores.py").write_text("# another\n")
    assert jit.hash_sources(copied) != jit.SOURCES_HASH
    monkeypatch.setattr(jit, "PACKAGE", copied)
    assert load()
    assert not list(cache.iterdir())
    monkeypatch.setattr(jit, "SOURCES_HASH", jit.hash_sources(copied))
    monkeypatch.setattr(jit, "_PARTS", {})
    assert load()
    assert len(list(cache.iterdir())) == len(source().texts())


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_damaged_object_files_are_made_again(damage: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    files = {path: path.read_bytes() for path in cache.iterdir()}
    for path, whole in files.items():
        changed = bytearray(whole)
        changed[len(whole) // 2] ^= 1
        path.write_bytes({"truncated": whole[:-100], "changed": bytes(changed), "empty": b""}[damage])
    monkeypatch.setattr(jit, "_PARTS", {})
    assert load()
    assert files == {path: path.read_bytes() for path in cache.iterdir()}


def test_a_directory_that_cannot_be_written_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.joinpath("cpu").write_text("a file where the directory should be")
    assert load()
    monkeypatch.setattr(user_files.tempfile, "mkstemp", mock.Mock(side_effect=PermissionError))
    assert load()


def test_processes_that_begin_at_once_compile_once(tmp_path: Path) -> None:
    """Forked after all imports, so that they need the kernel at the same time."""
    code = (
        "import os, torch, flashtile; from flashtile.backend.cpu import jit\n"
        "q = torch.ones(1, 1, 4, 8); children = []\n"
        "compile_object = jit.compile_object\n"
        "def told(text, machine):\n"
        "    os.write(1, f'{hash(text)}\\n'.encode())\n"
        "    return compile_object(text, machine)\n"
        "jit.compile_object = told\n"
        "for _ in range(6):\n"
        "    children.append(os.fork())\n"
        "    if children[-1] == 0: os._exit(0 if (flashtile.attention(q, q, q) == 1).all() else 1)\n"
        "assert all(os.waitpid(child, 0)[1] == 0 for child in children)"
    )
    environment = os.environ | {CACHE_VARIABLE: str(tmp_path), "FLASHTILE_CPU_KERNELS": "none"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, timeout=100, check=True, capture_output=True, text=True
    )
    compiled = ended.stdout.split()
    assert len(compiled) == len({*compiled}) == len(list((tmp_path / "cpu").iterdir()))


def test_kernels_for_arm_compile() -> None:
    """Cross-compile: the test inspects the assembly and the object file."""
    from llvmlite import binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = targets.make_target("neon")
    processor = targets.generic("neon", "aarch64-unknown-linux-gnu")
    everything = arguments.Variant(
        "float16", 4, softcap=True, bias="float32", head_terms=("slopes",), mask=True, dropout=True
    )
    moving = everything._replace(tangents=("q", "k", "v", "bias", "slopes"))
    kernels = *itertools.product((forward, backward), (VARIANT, everything)), (tangents, moving)
    for pass_, variant in kernels:
        machine = jit.target_machine(processor)
        for name, text in pass_.source(variant, target).texts().items():
            if name.startswith("scores"):  # of the others the object file alone, which takes the time
                assert "fmla" in machine.emit_assembly(llvm.parse_assembly(text))
            assert jit.compile_object(text, machine)[:4] == b"\x7fELF"


def test_functions_stay_short() -> None:
    """Several passes of LLVM take more than linear time in a function's length. Of a kernel that shares parts with
    others, its own module is less than a third.
    """
    plain = arguments.Variant("float32", 4, row_values=True)
    kernels = (forward, plain), (backward, plain), (tangents, plain._replace(tangents=("q", "k", "v")))
    for pass_, variant in kernels:
        for extra in ({}, {"softcap": True, "bias": "float32", "head_terms": ("slopes",), "mask": True}):
            texts = pass_.source(variant._replace(**extra), targets.host()).texts()
            functions = [len(x.splitlines()) for text in texts.values() for x in text.split("\ndefine ")]
            assert max(functions) < 1000
            assert len(texts[""]) < 1 / 3 * sum(map(len, texts.values()))


@pytest.mark.parametrize("requested", ["mmx", ""])
def test_vectors_that_the_processor_lacks_are_refused(requested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every use is refused with one message, also for a call that has a plan already."""
    case = dense_case(head_dim=9)
    case.run("cpu")
    q = case.arguments["q"]
    monkeypatch.setenv(targets.VECTORS_VARIABLE, requested)
    told = f"FLASHTILE_CPU_VECTORS is {requested!r}. Accepted here: '"
    for refused in (lambda: case.run("cpu"), lambda: flashtile.attention(q, q, q), lambda: flashtile.explain(q, q, q)):
        with pytest.raises(BackendError) as raised:
            refused()
        assert str(raised.value).startswith(told)
    assert {x.name: x.reason for x in flashtile.backends()}["cpu"].startswith(told)
    assert flashtile.attention(q, q, q, backend="tiled").isfinite().all()  # as the message says
