"""Rows whose scores all have a large term, on the emulation: every Hopper kernel that has scores."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import large_terms
from gluon_emulation.backend import emulated

pytestmark = pytest.mark.usefixtures("one_thread")
BF16, FP32 = torch.bfloat16, torch.float32
FUSED = ["forward", "preprocess", "backward", "postprocess"]
SPLIT = ["forward", "preprocess", "dq", "dkdv"]


@pytest.mark.parametrize(
    ("form", "width", "bias_dtype", "term", "kernels"),
    [
        ("bias", 64, FP32, torch.finfo(FP32).min, FUSED),
        ("bias", 64, BF16, torch.finfo(BF16).min, FUSED),  # in tiles
        ("score_mod", 64, FP32, -1e7, FUSED),
        ("split", 96, FP32, torch.finfo(FP32).min, ["forward", "combine", *FUSED[1:]]),
        ("split", 96, FP32, -1e7, ["forward", "combine", *FUSED[1:]]),
        ("bias", 160, FP32, torch.finfo(FP32).min, SPLIT),
        ("score_mod", 160, FP32, -1e7, SPLIT),
    ],
)
def test_results(form: str, width: int, bias_dtype: torch.dtype, term: float, kernels: list[str]) -> None:
    given = large_terms.inputs(term, rows=20, keys=136, width=width, dtypes=(BF16, bias_dtype))
    with emulated() as launched:
        assert large_terms.failures(form, "hopper", *given, needs_bias=False) == []
    assert launched == [f"{name}_kernel" for name in kernels]
