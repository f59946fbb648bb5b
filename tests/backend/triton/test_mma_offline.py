"""Compile kernels of mma.sync for chips that are not in this machine; `python -m offline --full` compiles all."""

from unittest import mock

import pytest

pytest.importorskip("triton.experimental.gluon")

from offline.compiled import KIB, compile_launch
from offline.families import most_registers
from offline.mma import MOST_SPILLED, PLAIN, feature_calls, launches_of_mma

from flashtile.backend.gpu import block_lists
from flashtile.backend.gpu.chips import SHARED_MEMORY


@pytest.mark.parametrize(
    ("feature", "head_dim", "arch", "kernel"),
    [
        (PLAIN, 64, "sm_80", "backward"),
        (PLAIN, 128, "sm_89", "forward"),
        (PLAIN, 512, "sm_80", "wide_forward"),
        ("score_mod", 64, "sm_120", "forward"),
    ],
)
def test_compiles_within_the_chip(feature: str, head_dim: int, arch: str, kernel: str) -> None:
    with mock.patch.object(block_lists, "LEAST_PAIRS", 0):
        launches = launches_of_mma(feature_calls(head_dim)[feature], head_dim, arch)
        (launch,) = [x for x in launches if x.name == kernel]
    found = compile_launch(launch, arch)
    assert 0 < found.shared <= SHARED_MEMORY[arch] * KIB
    assert 0 < found.registers <= most_registers(arch)
    if feature == PLAIN:
        assert found.spilled <= MOST_SPILLED
