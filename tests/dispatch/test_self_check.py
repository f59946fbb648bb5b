"""The self-check of kernels from a Triton of unknown version, with invented versions and answers."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from forced import in_order
from gluon_emulation.backend import emulated
from hopper_variants import SHORT, call_of_family

import flashtile
from flashtile import AttentionWarning
from flashtile.backend.gpu import cost
from flashtile.backend.hopper import support
from flashtile.backend.hopper.support import KernelClass
from flashtile.call.call import Call, Needs
from flashtile.call.device import Device
from flashtile.call.problem import Problem
from flashtile.dispatch import compare_with_tiled, passes, planner, self_check

H200 = Device("cuda", "NVIDIA H200", "sm_90", 132)
FORWARD, BACKWARD = KernelClass(False, 64, 64, False, 2), KernelClass(True, 64, 64, False, 2)
FLOAT32 = KernelClass(True, 96, 80, False, 2, float32=True)
RIGHT, WRONG, UNKNOWN = (True, None), (True, "out is wrong in 3 of 4 elements"), (False, "it did not end")


@contextmanager
def unknown_triton(answer: tuple[bool, str | None], release: str = "4.0.0") -> Iterator[mock.Mock]:
    """Triton 4.0 on an H200, and a check that would answer this; yields the check."""
    version = tuple(map(int, release.split(".")[:2]))
    with (
        mock.patch.multiple(support, triton_version=lambda: version, unusable=lambda: None),
        mock.patch.multiple(self_check, triton_release=lambda: release, _answers={}),
        mock.patch("flashtile.backend.triton.support.unusable", return_value=None),
        mock.patch.object(cost, "ranked", in_order),
        mock.patch.object(self_check, "answer", return_value=answer) as run,
    ):
        yield run


def chosen(backend: str = "auto", needs: Needs | None = None, **changes: Any) -> planner.Plan:
    problem = replace(Problem.describe(call_of_family("causal", 64, SHORT)), **changes)
    return planner._plan.__wrapped__(problem, H200, backend, needs, None)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_each_class_is_checked_once_and_remembered(own_folder: Path) -> None:
    with unknown_triton(RIGHT) as run:
        for needs in (None, None, Needs(True, True, True)):
            assert chosen(needs=needs).backend == "hopper"
        assert [call.args for call in run.call_args_list] == [("hopper", FORWARD), ("hopper", BACKWARD)]
    with unknown_triton(WRONG) as run:  # another process
        assert chosen().backend == "hopper"
        run.assert_not_called()
    with unknown_triton(RIGHT, "4.0.1") as run:
        chosen()
        run.assert_called_once()
    with unknown_triton(RIGHT) as run, mock.patch.object(self_check, "digest", return_value="other kernels"):
        chosen()
        run.assert_called_once()
    stored = [json.loads(file.read_text()) for file in (own_folder / "self-checks").iterdir()]
    assert {(x["triton"], x["failure"]) for x in stored} == {("4.0.0", None), ("4.0.1", None)}


def test_a_failure_falls_back_with_one_warning() -> None:
    with unknown_triton(WRONG):
        with pytest.warns(AttentionWarning, match=r"(?s)forward, dense.*Triton 4\.0\.0.*3 of 4.*report.*flashtile env"):
            plan = chosen()
        assert plan.backend == "triton"
        assert "3 of 4" in dict(plan.why)["hopper"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert chosen().backend == "triton"
            with pytest.raises(flashtile.BackendError, match="3 of 4"):  # never replaced
                chosen("hopper")
    with unknown_triton(RIGHT) as run:  # another process
        with pytest.warns(AttentionWarning):
            assert chosen().backend == "triton"
        run.assert_not_called()


def test_a_check_that_did_not_end_is_tried_again(own_folder: Path) -> None:
    with unknown_triton(UNKNOWN), pytest.warns(AttentionWarning, match="did not end"):
        assert chosen().backend == "triton"
    with unknown_triton(RIGHT):
        assert chosen().backend == "hopper"
    for file in (own_folder / "self-checks").iterdir():
        file.write_text('{"failure": 7')
    with unknown_triton(RIGHT) as run:
        assert chosen().backend == "hopper"
        run.assert_called_once()


def test_known_versions_are_not_checked() -> None:
    with unknown_triton(WRONG, "3.9.4") as run:
        assert chosen().backend == "hopper"
        run.assert_not_called()


@contextmanager
def kernels_on_a_cpu(mistake: Any = lambda out, call: out) -> Iterator[list[str]]:
    """`hopper` on the emulation, with a mistake in its forward pass; every other backend as it is. Yields the names of
    the kernels launched.
    """
    real = passes.entry_of
    with emulated() as launched:
        entry = passes.entry_of("hopper")
        wrong = mock.Mock(wraps=entry)
        wrong.forward = lambda plan, call: mistake(entry.forward(plan, call), call)
        with mock.patch.object(passes, "entry_of", lambda name: wrong if name == "hopper" else real(name)):
            yield launched


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kernels", [FORWARD, BACKWARD, FLOAT32])
def test_right_kernels_pass(kernels: KernelClass, packed: bool) -> None:
    with kernels_on_a_cpu() as launched:
        assert compare_with_tiled.examine("hopper", kernels._replace(packed=packed), torch.device("cpu")) is None
    assert ("float32_forward_kernel" in launched) == kernels.float32


@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_the_plan_has_the_kernels_in_question(warpgroups: int, packed: bool) -> None:
    kernels = KernelClass(False, 64, 64, packed, warpgroups)
    call = compare_with_tiled.small_call(kernels, torch.device("cpu"))
    with mock.patch.object(planner, "describe_device", return_value=H200):
        assert compare_with_tiled.plan_of("hopper", call, kernels=kernels).tile.forward.num_warpgroups == warpgroups


def without_the_last_keys(results: Any, call: Call) -> Any:
    t = call.tensors
    fewer = t._replace(k=t.k[:, :, :-16], v=t.v[:, :, :-16])
    part = Call(fewer, call.settings._replace(diagonal=16))
    return compare_with_tiled.run("tiled", part)


MISTAKES = {
    "a factor": lambda results, call: (results[0] * 1.03, results[1]),
    "lse": lambda results, call: (results[0], results[1] + 0.02),
    "missing keys": without_the_last_keys,
    "NaN": lambda results, call: (results[0].index_fill(2, torch.tensor([5]), torch.nan), results[1]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_kernels_are_found(name: str) -> None:
    with kernels_on_a_cpu(MISTAKES[name]):
        failure = compare_with_tiled.examine("hopper", FORWARD, torch.device("cpu"))
    assert failure is not None
    assert "is wrong in" in failure


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_process_says_so() -> None:
    """The process itself: its answer is read, and is none to keep."""
    final, failure = self_check.answer("hopper", FORWARD)
    assert not final
    assert failure is not None
    assert "CUDA" in failure or "NVIDIA" in failure
