"""The contract on a GPU, in the backends that run anywhere: `pytest -m gpu` on a machine that has one."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import flashtile
from flashtile.call.cache import rows_in_order
from flashtile.dispatch import fast_path
from flashtile.testing.generate import random_case
from flashtile.testing.oracle import solve
from flashtile.testing.tolerance import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore::flashtile.errors.AttentionWarning"),
]
BACKENDS = ("tiled", "reference")


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Inside, an operation that makes the host wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("first_seed", range(0, 400, 50))
def test_random_problems_are_within_the_bound(first_seed: int) -> None:
    failures = []
    for seed in range(first_seed, first_seed + 50):
        case = random_case(seed, device="cuda")
        expected = solve(case)
        for backend in BACKENDS:
            results = {name: x.cpu() for name, x in case.run(backend).items()}
            worst = compare(results, case, expected)[0]
            if not worst.ok:
                failures.append(f"{backend} seed {seed}: {worst}\n{case.description}")
    assert not failures, "\n".join(failures)


def test_the_dropout_mask_is_that_of_the_cpu() -> None:
    q, k = (torch.zeros(2, 3, n, 8) for n in (37, 51))
    v = torch.eye(51).expand(2, 3, 51, 51)
    arguments = {"dropout_p": 0.4, "dropout_seed": 2**63 + 5}
    on_cpu = flashtile.attention(q, k, v, **arguments)
    on_gpu = flashtile.attention(q.cuda(), k.cuda(), v.cuda(), **arguments)
    assert torch.equal(on_cpu != 0, on_gpu.cpu() != 0)


def varlen_call() -> dict[str, torch.Tensor]:
    q, k, v = (torch.randn(90, 4, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    offsets = torch.tensor([0, 0, 40, 41, 80], dtype=torch.int32, device="cuda")
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}


def test_nothing_waits_for_the_gpu() -> None:
    call = varlen_call()
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    dense = [x.unflatten(0, (2, 45)).transpose(1, 2) for x in (call["q"], call["k"], call["v"])]

    def run() -> None:
        out, lse = flashtile.attention_varlen(**call, causal=True, dropout_p=0.1, dropout_seed=seed, return_lse=True)
        (out.sum() + lse.nan_to_num(neginf=0).sum()).backward()
        flashtile.attention(*dense, window=(7, 0), sinks=torch.zeros(4, device="cuda")).sum().backward()

    run()  # the first split call of a process reserves semaphores for graphs, and waits
    with no_synchronisation():
        for _ in range(3):
            run()


@pytest.mark.parametrize("causal", [False, True])
def test_offsets_outside_the_tokens_are_keys_that_do_not_exist(causal: bool) -> None:
    call = varlen_call() | {"causal": causal}
    flashtile.attention_varlen(**call)  # the first call loads kernels, which may wait
    bad = torch.tensor([0, 0, 40, 41, 1000], dtype=torch.int32, device="cuda")
    good = torch.tensor([0, 0, 40, 41, 90], dtype=torch.int32, device="cuda")
    with no_synchronisation():
        clamped = flashtile.attention_varlen(**(call | {"cu_seqlens_q": bad, "cu_seqlens_k": bad}))
    expected = flashtile.attention_varlen(**(call | {"cu_seqlens_q": good, "cu_seqlens_k": good}))
    torch.testing.assert_close(clamped, expected)


@torch.no_grad()
def test_a_captured_decode_step_replays_with_new_lengths() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    k_cache, v_cache = (torch.zeros(2, 2, 64, 32, device="cuda") for _ in range(2))
    q = torch.randn(2, 4, 1, 32, device="cuda", generator=generator)
    k, v = (torch.randn(2, 2, 1, 32, device="cuda", generator=generator) for _ in range(2))
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")
    caches = [x.clone() for x in (k_cache, v_cache)]

    def step(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        return flashtile.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, k=k, v=v, causal=True)

    step(*caches)  # warms up outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(k_cache, v_cache)
    for n in range(8):
        for x in (q, k, v):
            x.normal_(generator=generator)
        lengths.fill_(n)
        graph.replay()
        torch.testing.assert_close(out, step(*caches))


def test_a_capture_launches_nothing_for_the_rows_of_a_dense_cache() -> None:
    """It reads numbers that a call before it has made, which stay when other batches follow."""
    device = torch.device("cuda", torch.cuda.current_device())
    known = rows_in_order(3, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rows_in_order(4, device)
        copy = captured.clone()
    assert captured.data_ptr() == known.data_ptr()
    for batch in range(5, 100):  # more than are remembered
        rows_in_order(batch, device)
    graph.replay()
    assert copy.flatten().tolist() == captured.flatten().tolist() == [0, 1, 2, 3]


def test_a_seed_on_the_device_changes_a_captured_graph() -> None:
    q, k, v = (torch.randn(1, 2, 40, 16, device="cuda") for _ in range(3))
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    flashtile.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)
    for value in (3, 4):
        seed.fill_(value)
        graph.replay()
        torch.testing.assert_close(out, flashtile.attention(q, k, v, dropout_p=0.5, dropout_seed=value))


def test_repeats_are_bitwise_equal() -> None:
    case = random_case(7, device="cuda", dtypes=(torch.bfloat16,))
    first = case.run("tiled", deterministic=True)
    for _ in range(10):
        again = case.run("tiled", deterministic=True)
        assert all(torch.equal(first[name].nan_to_num(), again[name].nan_to_num()) for name in first)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_second_gpu_while_the_first_is_current() -> None:
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda:1", requires_grad=True) for _ in range(3))
    with torch.cuda.device(0):
        out = flashtile.attention(q, k, v, causal=True)
        out.sum().backward()
    assert out.device == q.device
    torch.testing.assert_close(out.cpu(), flashtile.attention(q.cpu(), k.cpu(), v.cpu(), causal=True))


def test_compiled_and_under_autocast() -> None:
    q, k, v = (torch.randn(2, 4, 100, 64, device="cuda", requires_grad=True) for _ in range(3))

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = flashtile.attention(q, k, v, causal=True)
        assert isinstance(out, torch.Tensor)
        assert out.dtype is torch.bfloat16
        return out.float().square().sum()

    eager, compiled = loss(q, k, v), torch.compile(loss, fullgraph=True)(q, k, v)
    torch.testing.assert_close(eager, compiled)
    for a, b in zip(torch.autograd.grad(eager, (q, k, v)), torch.autograd.grad(compiled, (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_with_graphs(dtype: torch.dtype) -> None:
    """`mode="reduce-overhead"` captures forward and backward; inputs and lengths of keys change between replays."""
    q, k, v = (torch.randn(2, 4, 96, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    lengths = torch.tensor([96, 31], dtype=torch.int32, device="cuda")

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden = torch.arange(96, device="cuda") < lengths[:, None, None, None]
        return flashtile.attention(q * 2, k, v, causal=True, mask=hidden).float().square().sum()

    compiled = torch.compile(loss, fullgraph=True, mode="reduce-overhead")
    for n in range(5):
        with torch.no_grad():
            q.copy_(torch.randn_like(q))
            lengths.fill_(96 - 9 * n)
        torch.compiler.cudagraph_mark_step_begin()
        value = compiled(q, k, v, lengths)
        found = torch.autograd.grad(value, (q, k, v))
        eager = loss(q, k, v, lengths)
        torch.testing.assert_close(value.detach().clone(), eager, rtol=1e-3, atol=1e-3)
        for a, b in zip(found, torch.autograd.grad(eager, (q, k, v)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3 if dtype == torch.float32 else 3e-2)


def test_auto_says_once_that_a_slow_backend_was_chosen() -> None:
    from flashtile.dispatch import planner

    planner._warn_once.cache_clear()
    q = torch.randn(1, 1, 8, 8, device="cuda", dtype=torch.float64)
    with pytest.warns(flashtile.AttentionWarning, match="tiled"):
        flashtile.attention(q, q, q)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flashtile.attention(q, q, q)


MEMORY_STEP = 4 * 2**20  # bytes; the results of the test have 16 MiB each


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("backend", ["hopper", "triton", "tiled"])
def test_memory_that_runs_out_leaves_everything_usable(backend: str, again: bool) -> None:
    """Wherever forward or backward fails, the same call gives the same result once there is memory: also the first
    call of its kind, whose passes are written down, and in a graph that is captured afterwards.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(4, 8, 2048, 128, device="cuda", generator=generator) for _ in range(3))
    leaves = [x.to(torch.bfloat16).requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(leaves[0])
    del q, k, v

    def run() -> tuple[torch.Tensor, ...]:
        out = flashtile.attention(*leaves, causal=True, deterministic=True, backend=backend)
        return out, *torch.autograd.grad(out, leaves, dout)

    def forget() -> None:
        if not again and backend != "tiled":
            from flashtile.backend.triton.launch import semaphores

            fast_path.forget()
            semaphores._of_streams.clear()

    def memory(extra: int | None) -> None:
        torch.cuda.empty_cache()
        of_all = 1.0 if extra is None else (reserved + extra) / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(of_all)

    try:
        expected, failures = run(), 0
    except flashtile.BackendError as error:
        pytest.skip(str(error))
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()  # once: blocks that a failed run keeps must not raise the limit
    fragments = reserved - torch.cuda.memory_allocated()  # left by tests before this one
    try:
        for extra in range(0, 2**31, MEMORY_STEP):
            forget()
            gc.collect()
            memory(extra)
            try:
                results = run()
            except torch.OutOfMemoryError:
                failures, results = failures + 1, None
            memory(None)
            forget()
            assert all(torch.equal(x, y) for x, y in zip(run(), expected, strict=True))
            if results is not None:
                break
    finally:
        memory(None)
    assert results is not None
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    assert failures >= (sum(x.nbytes for x in expected) - fragments) // MEMORY_STEP - 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        out = flashtile.attention(*leaves, causal=True, deterministic=True, backend=backend)
    graph.replay()
    assert torch.equal(out, expected[0])
