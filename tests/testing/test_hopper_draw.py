"""Random problems on a Hopper GPU: the kernels of that GPU take most of them, and the others stay."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flashtile.backend.hopper import support
from flashtile.call.call import Call, Gradients, Needs, lse_shape, new_rows
from flashtile.call.device import Device
from flashtile.dispatch import fast_path, passes, planner
from flashtile.errors import BackendError
from flashtile.testing.case import Case
from flashtile.testing.draw import RECORDED
from flashtile.testing.generate import DTYPES, random_case

H100 = Device("cuda", "NVIDIA H100", "sm_90", 132)
SEEDS = range(200)
HALF = (torch.float16, torch.bfloat16)


def forward(_: Any, call: Call) -> tuple[Tensor, Tensor]:
    q, v = call.tensors.q, call.tensors.v
    return new_rows(q, q.shape[1], v.shape[-1], q.dtype), torch.empty(lse_shape(q))


def backward(_: Any, call: Call, needs: Needs, *rows: Tensor | None) -> Gradients:
    tensors = (*(getattr(call.tensors, name) for name in needs._fields[:-1]), *call.tensors.score_mod_tensors)
    given = zip(tensors, needs.flat(), strict=True)
    return Gradients.from_flat([torch.zeros_like(x) if needed else None for x, needed in given])


def taken(cases: list[Case]) -> list[Case]:
    """The problems that Hopper's kernels would run, forward and backward."""
    kernels, entry_of = SimpleNamespace(forward=forward, backward=backward), passes.entry_of
    found = []
    with (
        mock.patch.object(planner, "describe_device", return_value=H100),
        mock.patch.object(passes, "entry_of", lambda name: kernels if name == "hopper" else entry_of(name)),
        mock.patch.multiple(support, unusable=lambda: None, unknown_kernels=lambda *_: None),
    ):
        fast_path.forget()
        for case in cases:
            try:
                case.run("hopper")
            except BackendError:
                continue
            found.append(case)
    fast_path.forget()
    return found


@pytest.mark.parametrize(("dtypes", "variation"), [(None, 0), (HALF, 1)])
def test_hopper_takes_half_of_the_problems(dtypes: tuple[torch.dtype, ...] | None, variation: int) -> None:
    cases = [random_case(seed, dtypes=dtypes, variation=variation, on_hopper=True) for seed in SEEDS]
    run = taken(cases)
    assert len(run) > len(cases) / 2
    assert sum(case.differentiates for case in run) > len(cases) / 3
    assert {case.function for case in run} == {case.function for case in cases}
    assert {case.dtype for case in cases} == set(dtypes or DTYPES)
    run_with, given = ({name for case in some for name in case.arguments} for some in (run, cases))
    assert given - run_with == {
        "seqused_q",
        "leftpad_k",
        "attention_chunk",
        "q_descale",
        "k_descale",
        "v_descale",
        "out_dtype",
    }
    elsewhere = [random_case(seed, dtypes=dtypes, variation=variation) for seed in SEEDS]
    kept = sum(case.description == other.description for case, other in zip(cases, elsewhere, strict=True))
    assert kept > len(cases) / 4


def test_recorded_seeds_keep_their_problems() -> None:
    for seed in RECORDED[:20]:
        assert random_case(seed, on_hopper=True).description == random_case(seed).description
