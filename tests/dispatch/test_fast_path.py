"""The fast path: the same results as without it, whatever changes between calls."""

import gc
import itertools
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import DeviceContext

import flashtile
from flashtile import mask_mods, score_mods
from flashtile.backend.cpu.blocks import BlockTable
from flashtile.dispatch import fast_path, operators
from flashtile.errors import ArgumentError, BackendError
from flashtile.testing.generate import random_case
from flashtile.testing.oracle import solve
from flashtile.testing.tolerance import compare

SEEDS = range(5000, 5014)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    fast_path.forget()
    yield
    fast_path.forget()


@contextmanager
def switched_off() -> Iterator[None]:
    with mock.patch.object(fast_path, "enabled", False):
        yield


@contextmanager
def counted(name: str) -> Iterator[mock.Mock]:
    """Calls of a function of the fast path's module."""
    with mock.patch.object(fast_path, name, wraps=getattr(fast_path, name)) as function:
        yield function


def inputs(seqlen: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, 2, seqlen, 16, dtype=dtype) for _ in range(3))
    return q, k, v


def expected(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with switched_off():
        return flashtile.attention(q, k, v, **options)


def entries() -> list[fast_path.Entry]:
    """All that the table has, of repeated calls too."""
    values = [*fast_path.table.recent.values(), *fast_path.table.older.values()]
    known = [x for x in values if isinstance(x, fast_path.Entry)]
    known += [one.entry for calls in values if isinstance(calls, list) for one in calls]
    return [*{id(entry): entry for entry in known}.values()]


def recordings() -> list[fast_path.Entry]:
    return [entry for entry in entries() if entry.forward.replay is not None]


def num_kept() -> int:
    return len(fast_path.table.recent) + len(fast_path.table.older)


@pytest.mark.parametrize("seed", SEEDS)
def test_off_planned_recorded_and_replayed(seed: int) -> None:
    """The contract's random calls, and bit for bit the same each time."""
    case = random_case(seed)
    try:
        with switched_off():
            results = case.run("cpu")
    except BackendError:
        pytest.skip("declined")
    solved = solve(case)
    assert [str(x) for x in compare(results, case, solved) if not x.ok] == []
    for _ in range(5):
        again = case.run("cpu")
        assert [str(x) for x in compare(again, case, solved) if not x.ok] == []
        if case.arguments.get("dropout_p", 0) == 0 or "dropout_seed" in case.arguments:
            assert all(torch.equal(again[name].nan_to_num(), x.nan_to_num()) for name, x in results.items())


def test_a_layout_is_recorded_when_it_is_seen_for_the_second_time() -> None:
    for planned, recorded in ((1, 0), (1, 1), (1, 1)):
        flashtile.attention(*inputs())
        assert len(entries()) == planned
        assert len(recordings()) == recorded
    with counted("plan_call") as plan:
        flashtile.attention(*inputs())
    assert plan.call_count == 0


def test_a_growing_sequence_leaves_the_hot_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "GENERATION", 8)
    for _ in range(2):
        flashtile.attention(*inputs(7))
    (hot,) = recordings()
    for n in range(40):
        flashtile.attention(*inputs(10 + n))
        flashtile.attention(*inputs(7))
        assert recordings() == [hot]
        assert num_kept() <= 2 * 8
    for n in range(20):
        flashtile.attention(*inputs(60 + n))
    assert recordings() == []  # least recently used


def test_backward_layouts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "MOST_PASSES", 4)
    q, k, v = (x.requires_grad_() for x in inputs())
    base = torch.randn(1, 2, 8, 64)
    for step in (1, 2, 3, 4):
        for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
            dout = base[..., : 16 * step : step]
            if order[1] == 2:
                dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
            torch.autograd.grad(flashtile.attention(q, k, v), (q, k, v), dout)
    (entry,) = entries()
    assert sum(map(len, entry.backward.values())) <= 4


@pytest.mark.parametrize("names", ["xyy", "xxx"])
def test_one_tensor_in_several_places(names: str) -> None:
    """Its backward pass is recorded once, and the recording serves different tensors as well."""
    leaves = dict(zip("xyz", (x.requires_grad_() for x in inputs()), strict=True))

    def gradients(names: str) -> tuple[Tensor, ...]:
        given = [leaves[name] for name in names]
        loss = flashtile.attention(*given).square().sum()
        return torch.autograd.grad(loss, [leaves[name] for name in sorted(set(names))])

    first = gradients(names)
    for _ in range(3):
        assert all(map(torch.equal, gradients(names), first))
    (entry,) = entries()
    assert [one.replay is not None for passes in entry.backward.values() for one in passes] == [True]
    assert all(map(torch.equal, gradients("xyz"), gradients("xyz")))
    reference = torch.autograd.grad(
        flashtile.attention(*leaves.values(), backend="reference").square().sum(), [*leaves.values()]
    )
    for x, y in zip(gradients("xyz"), reference, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_saved_tensors_may_get_another_layout() -> None:
    """Between forward and backward: by hooks of saved tensors, or by assignment to `data`."""

    def transposed(x: Tensor) -> Tensor:
        return x.mT.contiguous().mT

    def gradients(leaves: list[Tensor], *, hooks: bool = False, assigned: bool = False) -> tuple[Tensor, ...]:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, transposed) if hooks else nullcontext():
            out = flashtile.attention(*leaves, causal=True)
        if assigned:
            leaves[1].data = transposed(leaves[1].data)
        return torch.autograd.grad(out.square().sum(), leaves)

    values = inputs(24)
    with switched_off():
        solved = gradients([x.clone().requires_grad_() for x in values])
    for case in ({}, {}, {}, {"hooks": True}, {"assigned": True}, {"hooks": True}, {}):
        found = gradients([x.clone().requires_grad_() for x in values], **case)
        torch.testing.assert_close(found, solved)


def test_nothing_is_kept_alive() -> None:
    tensors = [x.requires_grad_() for x in inputs()]
    memory = []
    for _ in range(3):
        out = flashtile.attention(*tensors)
        memory += [StorageWeakRef(x.untyped_storage()) for x in (out, *torch.autograd.grad(out.sum(), tensors))]
    memory += [StorageWeakRef(x.untyped_storage()) for x in tensors]
    del tensors, out
    gc.collect()
    assert all(x.expired() for x in memory)


def test_an_address_that_is_used_again() -> None:
    """By a tensor of another layout, or of the same one with other values."""
    memory = torch.randn(3, 4096)
    for n in range(12):
        seqlen = 8 if n % 3 else 16
        memory.normal_()
        q, k, v = (x[: 2 * seqlen * 16].view(1, 2, seqlen, 16) for x in memory)
        torch.testing.assert_close(flashtile.attention(q, k, v), expected(q, k, v))


def test_what_changes_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the environment, threads, and modes: none is remembered from another call."""
    q, k, v = inputs(40)
    for _ in range(3):
        flashtile.attention(q, k, v)
    for value, error in (("nonsense", BackendError), ("reference", None)):
        monkeypatch.setenv("FLASHTILE_BACKEND", value)
        reference = mock.patch("flashtile.backend.reference.entry.forward", side_effect=RuntimeError("the reference"))
        with reference, pytest.raises(error or RuntimeError):
            flashtile.attention(q, k, v)
    monkeypatch.delenv("FLASHTILE_BACKEND")
    monkeypatch.setenv("FLASHTILE_CPU_VECTORS", "xyz")
    with pytest.raises(BackendError, match="xyz"):
        flashtile.attention(q, k, v)
    monkeypatch.delenv("FLASHTILE_CPU_VECTORS")
    with torch.autocast("cpu", torch.bfloat16):
        assert flashtile.attention(q, k, v).dtype == torch.bfloat16
    assert flashtile.attention(q, k, v).dtype == torch.float32


def test_equal_scalars_of_other_types_are_still_refused() -> None:
    q, k, v = inputs()
    for _ in range(3):
        flashtile.attention(q, k, v, causal=True)
    with pytest.raises(ArgumentError, match="causal"):
        flashtile.attention(q, k, v, causal=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["with", "set"])
def test_a_default_device_leaves_it_on(kind: str) -> None:
    """Also one that no call may allocate on."""
    q, k, v = (x.requires_grad_() for x in inputs())
    out = flashtile.attention(q, k, v)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    try:
        with torch.device("meta") if kind == "with" else mock.MagicMock():
            if kind == "set":
                torch.set_default_device("meta")
            for _ in range(3):
                with mock.patch.object(operators.OPERATORS["dense"], "forward", side_effect=AssertionError):
                    assert torch.equal(flashtile.attention(q, k, v), out)
                found = torch.autograd.grad(flashtile.attention(q, k, v), (q, k, v), torch.ones_like(out))
                assert all(map(torch.equal, found, gradients))
                flashtile.attention_varlen(
                    *(x.detach()[0].transpose(0, 1) for x in (q, k, v)), *[OFFSETS] * 2, backend="tiled"
                )
    finally:
        torch.set_default_device(None)


def test_a_default_device_is_not_asked() -> None:
    """Each operation and each property of a tensor would ask it: three times the call's own time."""
    q, k, v = inputs()
    out = flashtile.attention(q, k, v)
    asked = mock.patch.object(DeviceContext, "__torch_function__", side_effect=AssertionError)
    with torch.device("meta"), asked:
        found = flashtile.attention(q, k, v)
    assert torch.equal(found, out)


OFFSETS = torch.tensor([0, 3, 8], dtype=torch.int32)


# Functions of pairs ---------------------------------------------------------------------------------------------------


def of_functions() -> dict[str, Any]:
    """A mask function and a score_mod with a tensor each."""
    mask = mask_mods.document(torch.tensor([0, 0, 0, 1, 1, 1, 1, 2]))
    return {"mask": mask, "score_mod": score_mods.alibi(torch.tensor([0.5, 0.125], requires_grad=True))}


@pytest.mark.parametrize("names", [("mask",), ("mask", "score_mod")], ids=" and ".join)
def test_functions_bypass_the_dispatcher(names: tuple[str, ...]) -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    arguments = {name: x for name, x in of_functions().items() if name in names}
    leaves = [q, k, v, *(x for name in names for x in arguments[name].tensors if x.requires_grad)]

    def results() -> list[Tensor]:
        out = flashtile.attention(q, k, v, **arguments)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    with switched_off():
        right = results()
    with mock.patch.object(operators.OPERATORS["dense"], "forward", side_effect=AssertionError):
        for _ in range(3):
            assert all(map(torch.equal, results(), right))
        for x in (x for name in names for x in arguments[name].tensors):  # in place: the values of now count
            x.detach().copy_(x.detach().flip(0))
        found = results()
    with switched_off():
        assert all(map(torch.equal, found, results()))
    assert not torch.equal(found[0], right[0])


def test_functions_share_no_recording() -> None:
    """With tensors of one layout; without a function; and with lists of blocks for other lengths."""
    q, k, v = inputs()
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    lists = torch.tensor([[[1, 2]]]), torch.tensor([[[[0, 1], [0, 1]]]])
    whole, shorter = (flashtile.BlockMask(*lists, block_size=(4, 4), seqlens=(n, n)) for n in (8, 7))
    prefixes = mask_mods.prefix(ids[:1]), flashtile.MaskMod(lambda b, h, i, j, n: (i - j).abs() <= n[b], (ids[:1],))
    arguments: list[dict[str, Any]] = [{"mask": x} for x in (*prefixes, whole, mask_mods.document(ids))]
    arguments += [{}, {"score_mod": score_mods.alibi(torch.rand(2))}, {"score_mod": score_mods.decay(torch.rand(2))}]
    right = [expected(q, k, v, **x) for x in arguments]
    for _ in range(3):
        for x, y in zip(arguments, right, strict=True):
            assert torch.equal(flashtile.attention(q, k, v, **x), y)
        with pytest.raises(ArgumentError, match="7 x 7"):
            flashtile.attention(q, k, v, mask=shorter)


def test_out_shares_memory_with_a_tensor_of_a_mask() -> None:
    """Kernels would read what they have written: the elements of later rows are those of earlier ones."""
    (q, _, _), (_, k, v) = inputs(400), inputs(16)
    visible = (torch.rand(1, 2, 400, 16) > 0.3).float()

    def mask(visible: Tensor) -> flashtile.MaskMod:
        return flashtile.MaskMod(lambda b, h, i, j, visible: visible[b, h, 399 - i, j] > 0, (visible,))

    right = flashtile.attention(q, k, v, mask=mask(visible))
    for _ in range(3):
        out = visible.clone()
        assert flashtile.attention(q, k, v, mask=mask(out), out=out) is out
        assert torch.equal(out, right)


def test_functions_of_a_kv_cache() -> None:
    q, k, v = (torch.randn(1, 2, 1, 16) for _ in range(3))
    lengths = torch.tensor([5], dtype=torch.int32)
    options = {"k": k, "v": v, "cache_seqlens": lengths, "mask": mask_mods.prefix(torch.tensor([2]))}
    options["score_mod"] = score_mods.alibi(torch.rand(2), lengths[0])

    def out() -> Tensor:
        return flashtile.attention_with_kvcache(q, *torch.ones(2, 1, 2, 8, 16), **options)

    with switched_off():
        right = out()
    with mock.patch("flashtile.call.device.host_readable", return_value=False):
        assert all(torch.equal(out(), right) for _ in range(3))


@pytest.mark.parametrize("which", ["cache", "packed", "pages"])
def test_lengths_may_change_between_replays_on_a_cpu(which: str) -> None:
    """Recorded calls read their own lengths, and refuse wrong ones as the first call does."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=g) for shape in ((3, 4, 2, 16), (3, 2, 900, 16), (3, 2, 900, 16)))

    def call(lengths: tuple[int, int, int], backend: str) -> Tensor:
        used = torch.tensor(lengths, dtype=torch.int32)
        if which == "cache":
            return flashtile.attention_with_kvcache(q, k, v, cache_seqlens=used, causal=True, backend=backend)
        if which == "pages":
            table = torch.arange(12, dtype=torch.int32).view(3, 4).flip(0)
            pages = (x.unflatten(2, (4, 225)).permute(0, 2, 3, 1, 4).flatten(0, 1) for x in (k, v))
            return flashtile.attention_with_kvcache(q, *pages, cache_seqlens=used, page_table=table, backend=backend)
        bounds = torch.cat([torch.zeros(1, dtype=torch.int32), used.cumsum(0, dtype=torch.int32)])
        packed = (x.transpose(1, 2).flatten(0, 1) for x in (q.repeat(1, 1, 450, 1), k, v))
        return flashtile.attention_varlen(*packed, bounds, bounds, causal=True, backend=backend)

    for lengths in ((5, 700, 31), (0, 12, 900), (900, 900, 900), (1, 2, 3), (800, 97, 0), (5, 700, 31)):
        torch.testing.assert_close(call(lengths, "cpu"), call(lengths, "tiled"), atol=1e-5, rtol=1e-5)
    with pytest.raises(ArgumentError):
        call((5, 2800, 31), "cpu")


def test_blocks_of_a_mask_function_follow_the_lengths_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences need no table of blocks; calls of the same layout whose sequences have grown do."""
    monkeypatch.setattr("flashtile.backend.cpu.blocks.LEAST_WORK", 2**14)
    (q, _, _), (_, k, v) = inputs(1), inputs(900)
    mask = flashtile.MaskMod(lambda b, h, i, j: j % 100 < 50)
    table = mock.patch.object(BlockTable, "entries", autospec=True, side_effect=BlockTable.entries)
    with table as entries:
        for length in (5, 5, 5, 900):
            assert not entries.called
            used = torch.tensor([length], dtype=torch.int32)
            out = flashtile.attention_with_kvcache(q, k, v, cache_seqlens=used, mask=mask, backend="cpu")
            right = flashtile.attention(q, k[:, :, :length], v[:, :, :length], mask=mask, backend="tiled")
            torch.testing.assert_close(out, right, atol=1e-5, rtol=1e-5)
        assert entries.called


def test_rotary_conventions_do_not_share_a_recording() -> None:
    """Lengths are not read, as on a GPU, so that calls with a cache are kept."""
    q, k, v = (torch.randn(1, 2, 1, 16) for _ in range(3))
    angles = torch.rand(8, 8)
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    lengths = torch.tensor([5], dtype=torch.int32)

    def outs(interleaved: bool, count: int) -> list[Tensor]:
        caches = torch.ones(2, 1, 2, 8, 16)
        options = rotary | {"k": k, "v": v, "cache_seqlens": lengths, "rotary_interleaved": interleaved}
        return [flashtile.attention_with_kvcache(q, *caches, **options) for _ in range(count)]

    with mock.patch("flashtile.call.device.host_readable", return_value=False):
        for interleaved in (True, False):
            with switched_off():
                (right,) = outs(interleaved, 1)
            assert all(torch.equal(x, right) for x in outs(interleaved, 3))
    assert len(entries()) == 2


def test_dropout_draws_anew() -> None:
    q, k, v = inputs(64)
    outs = [flashtile.attention(q, k, v, dropout_p=0.5) for _ in range(4)]
    assert all(not torch.equal(x, y) for x, y in itertools.pairwise(outs))
    for _ in range(3):
        seeded = flashtile.attention(q, k, v, dropout_p=0.5, dropout_seed=7)
        assert torch.equal(seeded, expected(q, k, v, dropout_p=0.5, dropout_seed=7))


def test_threads_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """While entries are made, recorded and dropped."""
    monkeypatch.setattr(fast_path, "GENERATION", 4)
    problems = [inputs(4 + n) for n in range(12)]
    right = [expected(*problem) for problem in problems]
    start = threading.Barrier(4)

    def work(thread: int) -> None:
        start.wait()
        for n in range(300):
            m = (n * (thread + 1)) % 12
            assert torch.equal(flashtile.attention(*problems[m]), right[m])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, thread) for thread in range(4)]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    assert num_kept() <= 2 * (4 + 4)
