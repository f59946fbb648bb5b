"""Amount that a report measures: quick and long reports differ in these settings only."""

from dataclasses import dataclass
from typing import Any

import torch

from ..bench.captured import HEAD_DIM, HEADS, STEPS
from ..bench.cell import Cell
from ..bench.sweep import Timing
from ..verification.examine import default_jobs

QUICK = Timing(rounds=5, sample_seconds=0.05, rest_seconds=0.01, most_seconds=4.0)
LONG_MODELS: dict[str, Any] = {
    "models_seconds": 600.0,
    "all_of_models": True,
}
PYTORCH_ON_CUDA = ("sdpa", "sdpa:cudnn", "sdpa:flash")
LONG = Timing(rounds=15, sample_seconds=0.1, rest_seconds=0.02)


@dataclass(frozen=True)
class Settings:
    """Settings of a report. `tokens` is batch times seqlen for speed on a GPU; `None` is a batch of 1. Memory and error
    are compared with `reference` and plain attention.
    """

    device: torch.device
    dtype: str
    heads: int
    head_dim: int
    inputs: str
    seqlens: tuple[int, ...]
    memory_seqlens: tuple[int, ...]
    peers: tuple[str, ...]
    reference: str
    timing: Timing
    quick: bool = True
    tokens: int | None = None
    long_heads: int | None = None  # heads of the longest calls; `None`: as the others
    memory_heads: int = 4
    error_seqlen: int = 256
    cases: int = 120  # random problems of the gate
    captured_cases: int = 40
    long_cases: int = 4
    variations: int = 1  # problems that differ in lengths and values alone, of each kernel that the gate compiles
    gate_seconds: float = 30.0  # time of each kind; problems after these are left out, and the page says so
    gate_jobs: int = 1  # processes
    steps: int = STEPS  # steps of training, however long they take: captured inputs follow from them
    models_seconds: float = 20.0  # for cells of real models; cells after these are left out, and the page says so
    all_of_models: bool = False  # every provider of the sweep of models, also those that take long to compile

    @property
    def middle_seqlen(self) -> int:
        """The second longest length."""
        return self.seqlens[max(len(self.seqlens) - 2, 0)]

    def speed_cell(self, seqlen: int, measure: str, **fields: object) -> Cell:
        batch = 1 if self.tokens is None else max(1, self.tokens // seqlen)
        plain: dict[str, object] = {"batch": batch, "heads": self.heads, "seqlen_q": seqlen, "head_dim": self.head_dim}
        plain |= {"dtype": self.dtype, "causal": True, "inputs": self.inputs, "measure": measure}
        return Cell(**plain | fields)  # type: ignore[arg-type]


def settings_for(device: torch.device, quick: bool) -> Settings:
    """Settings for a kind of device. Quick reports end within two minutes on two cores."""
    if device.type == "cpu":
        return Settings(
            device=device,
            dtype="float32",
            heads=HEADS,
            head_dim=HEAD_DIM,
            inputs="captured",
            seqlens=(256, 512, 1024, 2048) if quick else (128, 256, 512, 1024, 2048, 4096, 8192),
            memory_seqlens=(256, 1024, 4096) if quick else (256, 512, 1024, 2048, 4096),
            peers=("sdpa", "plain") if quick else ("sdpa", "sdpa:math", "flex", "plain"),
            reference="sdpa",
            timing=QUICK if quick else LONG,
            quick=quick,
            cases=120 if quick else 1000,
            captured_cases=40 if quick else 300,
            variations=4 if quick else 1,
            gate_seconds=30.0 if quick else 600.0,
            gate_jobs=default_jobs(),
            long_heads=2,
            **({} if quick else LONG_MODELS),
        )
    return Settings(
        device=device,
        dtype="bfloat16",
        heads=16,
        head_dim=128,
        inputs="normal",
        seqlens=(512, 1024, 4096, 16384),
        memory_seqlens=(1024, 2048, 4096, 8192, 16384),
        peers=PYTORCH_ON_CUDA if quick else (*PYTORCH_ON_CUDA, "flex", "fa2", "fa3", "fa4"),
        reference="sdpa:cudnn",
        timing=QUICK if quick else LONG,
        quick=quick,
        tokens=16384,
        cases=120 if quick else 1000,
        captured_cases=40 if quick else 300,
        variations=4 if quick else 1,
        gate_seconds=12.0 if quick else 600.0,
        gate_jobs=default_jobs(),
        **({} if quick else LONG_MODELS),
    )
