"""Tiles of one Triton kernel, tried on a GPU: first compared with the fp64 oracle, then timed."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..api.explain import described_call
from ..backend.rates import synchronize
from ..backend.triton import configs
from ..backend.triton.tile_config import KernelConfig, TileConfig, WidthConfigs
from ..bench.check import spoil_memory
from ..bench.clocks import clock_of
from ..bench.rounds import Entrant, interleave
from ..bench.sweep import Timing
from ..call.call import Call, Needs
from ..call.device import describe_device
from ..call.plan import Plan
from ..dispatch.passes import entry_of
from ..testing.case import Case
from ..testing.oracle import Expected, solve
from ..testing.tolerance import worst
from .search import TuningError

CHECKED = (1, 4, 2, 333, 397)  # batch, heads, heads of keys, rows and keys: no tile divides them
TOKENS, WIDTH = 16384, 2048  # of a timed call: total rows, and elements of a row over all heads
TIMING = Timing(rounds=5, sample_seconds=0.01, rest_seconds=0.005)
NEEDS = {"dkdv": Needs(k=True, v=True), "dq": Needs(q=True)}


@dataclass(frozen=True)
class Subject:
    """The kernel to tune, and its calls."""

    kernel: str  # "forward", "dkdv" or "dq"
    dtype: torch.dtype
    head_dim: int
    seqlen: int
    device: torch.device

    def shipped(self) -> WidthConfigs:
        return configs.shipped(self.dtype, self.head_dim, describe_device(self.device))


class GpuTrial:
    """One kernel on this GPU, over two calls, causal and full; a call's other kernels are as shipped."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.row = subject.shipped()
        self.kernels: Any = entry_of("triton")
        self.clock = clock_of(subject.device)
        self.cases = [self.case(causal) for causal in (True, False)]
        self.expected: list[dict[str, Expected]] = [solve(case) for case in self.cases]
        heads = max(1, WIDTH // subject.head_dim)
        self.sizes = (max(1, TOKENS // subject.seqlen), heads, heads, subject.seqlen, subject.seqlen)
        self.timed = [self.inputs(self.sizes, causal) for causal in (True, False)]

    def inputs(self, sizes: tuple[int, ...], causal: bool) -> tuple[Call, Tensor]:
        """A call and a cotangent of its result."""
        batch, heads, heads_kv, rows, keys = sizes
        options: Any = {"dtype": self.subject.dtype, "device": self.subject.device}
        width = self.subject.head_dim
        q, dout = (torch.randn(batch, heads, rows, width, **options) for _ in range(2))
        k, v = (torch.randn(batch, heads_kv, keys, width, **options) for _ in range(2))
        return described_call(q, k, v, None, None, {"causal": causal, "backend": "triton"}), dout

    def case(self, causal: bool) -> Case:
        call, dout = self.inputs(CHECKED, causal)
        q, k, v = call.tensors[:3]
        forward_only = self.subject.kernel == "forward"
        return Case("attention", {"q": q, "k": k, "v": v, "causal": causal}, dout, forward_only=forward_only)

    def plan(self, launch: KernelConfig) -> Plan:
        row = self.row._replace(**{self.subject.kernel: launch})
        return Plan("triton", TileConfig(row.forward, row.dkdv, row.dq), 1, ())

    def refuses(self, launch: KernelConfig) -> str | None:
        for case, expected in zip(self.cases, self.expected, strict=True):
            spoil_memory(case)
            try:
                results = self.results(launch, case)
                synchronize(self.subject.device)
            except Exception as error:
                self.alive()
                return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            for name, x in results.items():
                deviation = worst(x, expected[name], self.subject.dtype, name)
                if not deviation.ok:
                    return f"wrong: {deviation}"
        return None

    def alive(self) -> None:
        """Check the GPU: after an error it may refuse all further work of this process."""
        try:
            synchronize(self.subject.device)
        except Exception as error:
            raise TuningError(f"the GPU does not go on after a tile: {error}") from error

    def results(self, launch: KernelConfig, case: Case) -> dict[str, Tensor]:
        """The kernel's results for a case."""
        options = {"causal": case.arguments["causal"], "backend": "triton"}
        q, k, v = (case.arguments[name] for name in "qkv")
        call, plan = described_call(q, k, v, None, None, options), self.plan(launch)
        out, lse = self.kernels.forward(plan, call)
        if self.subject.kernel == "forward":
            return {"out": out, "lse": lse}
        needs = NEEDS[self.subject.kernel]
        gradients = self.kernels.backward(plan, call, needs, out, lse, case.dout, None)
        return {f"d{name}": getattr(gradients, name) for name in "qkv" if getattr(needs, name)}

    def seconds(self, launches: Sequence[KernelConfig]) -> list[float]:
        """The sum over the two calls of each tile's medians."""
        totals = [0.0] * len(launches)
        for call, dout in self.timed:
            entrants = [Entrant(str(launch), self.run(launch, call, dout)) for launch in launches]
            interleave(self.clock, entrants, TIMING, str)
            for n, entrant in enumerate(entrants):
                if entrant.failure is not None:
                    self.alive()
                totals[n] += statistics.median(entrant.seconds) if entrant.failure is None else float("inf")
        return totals

    def run(self, launch: KernelConfig, call: Call, dout: Tensor) -> Any:
        plan = self.plan(launch)
        if self.subject.kernel == "forward":
            return lambda: self.kernels.forward(plan, call)
        out, lse = self.kernels.forward(self.plan(getattr(self.row, self.subject.kernel)), call)
        needs = NEEDS[self.subject.kernel]
        return lambda: self.kernels.backward(plan, call, needs, out, lse, dout, None)
