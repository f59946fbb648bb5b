"""The backend of a call: declared subsets, reasons, buckets, and no silent replacement."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from calls import dense_call
from checking import dense_case

import flashtile
from flashtile import AttentionWarning, BackendError
from flashtile.api.explain import described_call
from flashtile.call.call import Call, Features, Needs
from flashtile.call.device import Device
from flashtile.call.plan import Candidate
from flashtile.call.problem import Problem
from flashtile.dispatch import planner
from flashtile.dispatch.planner import SUPPORT, _warn_once, forget_plans, plan, plan_call

CPU = torch.device("cpu")
Q, K, V = (dense_case().arguments[name] for name in ("q", "k", "v"))


@pytest.fixture
def tiled_declines() -> Iterator[None]:
    flashtile.dispatch.fast_path.forget()
    with (
        mock.patch("flashtile.backend.cpu.support.declines", return_value="not on Sundays either"),
        mock.patch("flashtile.backend.tiled.support.declines", return_value="not on Sundays"),
    ):
        yield
    flashtile.dispatch.fast_path.forget()


def test_backends() -> None:
    """Each with a reason where it is not usable, fastest first."""
    found = flashtile.backends()
    assert [status.name for status in found][-2:] == ["tiled", "reference"]
    assert all(status.usable == (status.reason is None) and status.summary for status in found)
    with mock.patch("flashtile.backend.tiled.support.unusable", return_value="no tiles here"):
        tiled = next(status for status in flashtile.backends() if status.name == "tiled")
    assert (tiled.usable, tiled.reason) == (False, "no tiles here")


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_a_named_backend_runs(backend: str) -> None:
    kernel = mock.patch(f"flashtile.backend.{backend}.entry.forward", side_effect=RuntimeError("it ran"))
    with kernel as forward, pytest.raises(RuntimeError, match="it ran"):
        flashtile.attention(Q, K, V, backend=backend)
    assert forward.call_args.args[0].backend == backend


def test_auto_never_takes_the_reference(tiled_declines: None) -> None:
    with pytest.raises(BackendError, match=r"no backend takes this call: dense float\d+, batch .*, on CPU"):
        flashtile.attention(Q, K, V)


@pytest.mark.parametrize("backend", ["tiled", "auto"])
def test_declined(tiled_declines: None, backend: str) -> None:
    """The error has each backend's reason; a named backend is never replaced by another."""
    with pytest.raises(BackendError, match="tiled: not on Sundays") as raised:
        flashtile.attention(Q, K, V, backend=backend)
    assert raised.value.reasons["tiled"] == "not on Sundays"


@pytest.mark.parametrize("backend", ["", "cuda", "TILED", "auto "])
def test_unknown(backend: str) -> None:
    with pytest.raises(BackendError) as raised:
        flashtile.attention(Q, K, V, backend=backend)
    assert f"`backend` is {backend!r}" in str(raised.value)
    assert "'auto', 'hopper', 'triton', 'cpu', 'tiled', 'reference'" in str(raised.value)


@pytest.mark.parametrize("backend", ["cuda", "tiled", "auto"])
def test_error_shows_a_call_that_works(tiled_declines: None, backend: str) -> None:
    with pytest.raises(BackendError) as raised:
        flashtile.attention(Q, K, V, backend=backend)
    assert "a call that works" in str(raised.value)


def test_environment_chooses_for_auto_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_BACKEND", "reference")
    problem = Problem.describe(dense_call())
    assert plan(problem, CPU).backend == "reference"
    assert plan(problem, CPU, "tiled").backend == "tiled"


@pytest.mark.parametrize("asked", ["nonsense", "", " auto"])
def test_an_environment_that_asks_for_no_backend(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_BACKEND", asked)
    for refused in (flashtile.attention, flashtile.explain):
        with pytest.raises(BackendError) as raised:
            refused(Q, K, V)
        assert str(raised.value).startswith(f"FLASHTILE_BACKEND is {asked!r}. Accepted: 'auto', 'hopper', ")
    assert flashtile.attention(Q, K, V, backend="tiled").isfinite().all()  # as the message says
    assert str(raised.value).endswith("flashtile.attention(q, k, v, backend='tiled')")


def test_the_plan_depends_on_the_bucket_alone() -> None:
    """Lengths, batch and window up to the next power of two; lengths of dense calls of more than 16 rows up to a
    multiple of 32, or of the 32nd part of a power of two, few sequences exactly. Everything else makes another plan.
    """
    problem = replace(Problem.describe(dense_call()), seqlen_k=100)
    same = [replace(problem, seqlen_k=n) for n in (65, 101, 128)]
    assert len({id(plan(p, CPU)) for p in (problem, *same)}) == 1
    few = replace(problem, seqlen_q=257, seqlen_k=2049)
    assert plan(few, CPU) is plan(replace(few, seqlen_q=288, seqlen_k=2112), CPU)
    assert plan(replace(few, batch=3), CPU) is not plan(replace(few, batch=4), CPU)
    for changes in ({"seqlen_q": 289}, {"seqlen_k": 2113}):
        assert plan(replace(few, **changes), CPU) is not plan(few, CPU)
    packed = replace(few, layout="varlen")
    assert plan(packed, CPU) is plan(replace(packed, seqlen_q=512), CPU)
    others = [{"seqlen_k": 129}, {"head_dim": 16}, {"dtype": torch.bfloat16}, {"dropout": True}]
    others += [{"features": Features(bias=(True,) * 4)}, {"features": Features(sinks=True)}]
    others += [{"window": flashtile.call.window.Window(1)}, {"score_mod": "f#1"}, {"alignment": 1}, {"num_heads_kv": 1}]
    for changes in others:
        assert plan(replace(problem, **changes), CPU) is not plan(problem, CPU)


@pytest.mark.parametrize(("rows", "keys"), [(300, 1050), (1050, 300)])
def test_a_band_off_the_diagonal_keeps_its_width(rows: int, keys: int) -> None:
    """Of 129 keys around the top-left diagonal, rounded sides would leave one or 1149."""
    q, k = (torch.empty(1, 1, n, 8, device="meta") for n in (rows, keys))
    band = flashtile.ExactWindow(64 + keys - rows, 64 - (keys - rows))
    window = Problem.describe(described_call(q, k, k, None, None, {"window": band})).bucketed().window
    assert window.left is not None
    assert window.right is not None
    assert window.left + window.right == 128


def test_strides_enter_a_plan_as_alignment_alone() -> None:
    def described(x: torch.Tensor) -> Problem:
        call = dense_call()
        return Problem.describe(call._replace(tensors=call.tensors._replace(q=x, k=x, v=x)))

    contiguous, transposed = torch.randn(2, 4, 8, 16), torch.randn(2, 8, 4, 16).transpose(1, 2)
    assert described(contiguous) == described(transposed)
    assert described(contiguous).alignment == 16
    assert described(torch.randn(2, 4, 8, 17)[..., 1:]).alignment == 4
    assert described(torch.randn(2, 4, 8, 16).half()[..., 1:]).alignment == 2


def call_elsewhere() -> Call:
    """A call on no device of this machine: it can be planned."""
    call = dense_call()
    q, k, v = (x.to("meta") for x in call.tensors[:3])
    return call._replace(tensors=call.tensors._replace(q=q, k=k, v=v))


def test_a_slow_choice_on_an_accelerator_is_told_once() -> None:
    call = call_elsewhere()
    _warn_once.cache_clear()
    with pytest.warns(AttentionWarning, match="slow"):
        plan_call(call)
    plan_call(call)  # a second warning would be an error, by pytest's settings
    _warn_once.cache_clear()
    plan_call(call._replace(settings=call.settings._replace(backend="tiled")))  # asked for by name


def able(microseconds: float) -> dict[str, Any]:
    """A GPU backend that takes all calls, in so much time."""
    return {
        "unusable": lambda: None, "declines": lambda problem, device: None, "unknown_kernels": lambda *_: None,
        "candidates": lambda *_: [Candidate(None, 3, microseconds), Candidate(None, 2, 2 * microseconds)],
    }  # fmt: skip


def test_a_call_for_which_tiled_is_faster_is_no_slow_choice() -> None:
    forget_plans()
    _warn_once.cache_clear()
    with mock.patch.multiple(SUPPORT["triton"], create=True, **able(1e9)):
        chosen = plan_call(call_elsewhere())
    assert (chosen.backend, "expected to take 1e+09 us" in dict(chosen.why)["triton"]) == ("tiled", True)
    forget_plans()


@pytest.mark.parametrize(
    ("hopper", "triton", "chosen"), [(2.0, 3.0, "hopper"), (3.0, 2.0, "triton"), (2.0, 2.0, "hopper")]
)
def test_auto_takes_the_backend_of_the_least_expected_time(hopper: float, triton: float, chosen: str) -> None:
    """The one before of equal ones; a backend that is named runs whatever its time is."""
    forget_plans()
    with (
        mock.patch.multiple(SUPPORT["hopper"], **able(hopper)),
        mock.patch.multiple(SUPPORT["triton"], create=True, **able(triton)),
    ):
        found = plan_call(call_elsewhere())
        assert (found.backend, found.num_splits, found.microseconds) == (chosen, 3, 2.0)
        assert [name for name, _ in found.why] == ["hopper"] * (chosen == "triton")
        named = Problem.describe(call_elsewhere())
        assert plan(named, torch.device("meta"), "hopper").microseconds == hopper
    forget_plans()


@pytest.mark.parametrize(
    ("given", "enabled", "expected"), [(None, False, False), (None, True, True), (False, True, False)]
)
def test_deterministic_follows_torch(given: bool | None, enabled: bool, expected: bool) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(enabled)
    try:
        assert dense_call(deterministic=given).settings.deterministic is expected
    finally:
        torch.use_deterministic_algorithms(before)


# Forward mode ---------------------------------------------------------------------------------------------------------

QKV = Needs(True, True, True)
H100 = Device("cuda", "NVIDIA H100", "sm_90", 132)


@pytest.mark.parametrize(("backend", "takes"), [("auto", "triton"), ("hopper", "triton"), ("reference", "tiled")])
def test_a_backend_without_forward_mode_leaves_it_to_the_next(backend: str, takes: str) -> None:
    """With the reason, also if it is named."""
    q = torch.empty(1, 8, 1024, 64, dtype=torch.bfloat16)
    problem = Problem.describe(described_call(q, q, q, None, None, {})).bucketed()
    with (
        mock.patch.multiple(SUPPORT["triton"], unusable=lambda: None),
        mock.patch.multiple(SUPPORT["hopper"], unusable=lambda: None),
    ):
        chosen = planner._plan.__wrapped__(problem, H100, backend, None, QKV)
    assert chosen.backend == takes
    assert chosen.why[0][1].startswith("it has no kernel of forward mode")


def test_forward_mode_of_wide_heads_is_hoppers() -> None:
    """Above 64 features, unless a term of the scores moves."""
    for width in (128, 256):
        q = torch.empty(1, 8, 4096, width, dtype=torch.bfloat16)
        problem = Problem.describe(described_call(q, q, q, None, None, {"sinks": torch.zeros(8)})).bucketed()
        with (
            mock.patch.multiple(SUPPORT["triton"], unusable=lambda: None),
            mock.patch.multiple(SUPPORT["hopper"], unusable=lambda: None),
        ):
            found = [
                planner._plan.__wrapped__(problem, H100, "auto", None, QKV._replace(sinks=x)) for x in (False, True)
            ]
        assert [x.backend for x in found] == ["hopper", "triton"]


def test_forward_mode_of_float32_takes_what_is_faster() -> None:
    """An H200 took 6.2 ms by the kernel's tiles of 16 x 16, which multiply exactly, and 1.0 by `tiled`."""
    q = torch.empty(1, 8, 1024, 256)
    problem = Problem.describe(described_call(q, q, q, None, None, {})).bucketed()
    with mock.patch.multiple(SUPPORT["triton"], unusable=lambda: None):
        chosen = planner._plan.__wrapped__(problem, H100, "auto", None, QKV)
    assert chosen.backend == "tiled"
    assert dict(chosen.why)["triton"].startswith("expected to take")


def test_forward_mode_of_few_tiles_splits_keys() -> None:
    """Where programs would be left without work; a mask's lists of blocks are whole."""

    def chosen(width: int, **options: Any) -> Any:
        q, k = (torch.empty(1, 8, n, width, dtype=torch.bfloat16) for n in (64, 2**16))
        problem = Problem.describe(described_call(q, k, k, None, None, options)).bucketed()
        with (
            mock.patch.multiple(SUPPORT["triton"], unusable=lambda: None),
            mock.patch.multiple(SUPPORT["hopper"], unusable=lambda: None),
        ):
            return planner._plan.__wrapped__(problem, H100, "auto", None, QKV)

    for width in (64, 128):
        assert (chosen(width).backend, chosen(width).num_splits > 4) == ("triton", True)
    assert chosen(64, mask=torch.empty(1, 1, 64, 2**16, dtype=torch.bool)).num_splits == 1


def test_forward_mode_in_tiled_warns_on_a_gpu() -> None:
    """Once, if no kernel takes it."""
    _warn_once.cache_clear()
    call = dense_call()
    meta = call._replace(
        tensors=call.tensors._replace(**{x: getattr(call.tensors, x).to("meta") for x in ("q", "k", "v")})
    )
    with pytest.warns(AttentionWarning, match="forward mode of attention on meta runs in the `tiled` backend"):
        assert plan_call(meta, moves=QKV).backend == "tiled"
    plan_call(meta, moves=QKV)  # a second warning would be an error, by pytest's settings
    _warn_once.cache_clear()
