"""The trials of `flashtile tune`, in Triton's interpreter: right tiles are candidates, wrong ones are not."""

import os
from unittest import mock

import pytest
import torch

from flashtile.backend.triton.tile_config import KernelConfig
from flashtile.tuning import trial

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
def test_a_trial(kernel: str) -> None:
    small = mock.patch.multiple(trial, CHECKED=(1, 2, 1, 45, 51), TOKENS=32, WIDTH=32)
    with small:
        found = trial.GpuTrial(trial.Subject(kernel, torch.float16, 32, 32, torch.device("cpu")))
    launch = KernelConfig(32, 32, 4, 1)
    assert found.refuses(launch) is None
    assert len(found.seconds([launch, KernelConfig(16, 32, 4, 1)])) == 2
    right = found.results
    with mock.patch.object(found, "results", lambda *given: {name: 0.9 * x for name, x in right(*given).items()}):
        assert "wrong" in (found.refuses(launch) or "")
    with mock.patch.object(found, "results", side_effect=RuntimeError("out of resource: shared memory")):
        assert found.refuses(launch) == "RuntimeError: out of resource: shared memory"
