"""Rows whose scores all have a large term, in Triton's interpreter: every kernel that has scores."""

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from large_terms import failures, inputs

from flashtile.backend.triton import configs
from flashtile.backend.triton.tile_config import FusedConfig, KernelConfig, TileConfig
from flashtile.call.device import Device
from flashtile.call.problem import Problem
from flashtile.dispatch import fast_path

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities
]
SMALL = KernelConfig(16, 16, 4, 1)
WAYS: dict[str, dict[str, Any]] = {
    "one kernel": {"fused": FusedConfig(SMALL, "keys")},
    "a kernel for each gradient": {"fused": None, "forward": SMALL, "dkdv": SMALL, "dq": SMALL},
    "few rows": {"forward": KernelConfig(8, 16, 1, 1)},
}
tile_of = configs.tile


@pytest.fixture(autouse=True)
def other_plans() -> Iterator[None]:
    fast_path.forget()
    yield
    fast_path.forget()


@pytest.mark.parametrize("term", [-1e6, torch.finfo(torch.float32).min])
@pytest.mark.parametrize(
    ("way", "form"), [*((x, "bias") for x in WAYS), ("few rows", "split"), ("one kernel", "score_mod")]
)
def test_results(way: str, form: str, term: float) -> None:
    def tile(problem: Problem, device: Device) -> TileConfig:
        return tile_of(problem, device)._replace(given_splits=None, **WAYS[way])

    with mock.patch.object(configs, "tile", tile):
        assert failures(form, "triton", *inputs(term, rows=12, keys=40)) == []
