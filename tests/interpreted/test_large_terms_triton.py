"""Rows whose scores all have a large term, in Triton's interpreter: every kernel that has scores."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from forced import first, forced
from large_terms import failures, inputs

from flashtile.backend.triton import support
from flashtile.backend.triton.tile_config import FusedConfig, KernelConfig
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
    choice = first(given_splits=None, **WAYS[way])
    with forced(support, choice, choice):
        assert failures(form, "triton", *inputs(term, rows=12, keys=40)) == []
