"""Record the launches of a call by one of its candidates, the first of the tables unless another one is chosen, instead
of running them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from forced import Choice, first, in_order
from torch import Tensor
from triton.runtime.jit import JITFunction

from flashtile.backend.gpu import cost
from flashtile.backend.gpu.replay import Recorder
from flashtile.backend.hopper import entry as hopper_kernels
from flashtile.backend.hopper import support as hopper_support
from flashtile.backend.hopper.launch import backward_launches
from flashtile.backend.triton import entry as triton_kernels
from flashtile.backend.triton import support as triton_support
from flashtile.call.call import DIFFERENTIABLE, Call, Needs
from flashtile.call.device import Device
from flashtile.call.plan import Plan
from flashtile.call.problem import Problem

FIRST = first()
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg", "launch_pdl")
BACKENDS: dict[str, Any] = {
    "triton": (triton_support, triton_kernels),
    "hopper": (hopper_support, hopper_kernels),
}
CORES = {"sm_80": 108, "sm_90": 132}


@dataclass(frozen=True)
class Launch:
    kernel: JITFunction
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__.removesuffix("_kernel")

    @property
    def compiled_by(self) -> tuple[Any, ...]:
        """Key of a compiled kernel: constants, `None` arguments, and alignment of pointers."""
        constants = {p.name for p in self.kernel.params if p.is_constexpr} | {*OPTIONS}
        found = []
        for name, x in self.arguments.items():
            if isinstance(x, Tensor):
                found.append((name, x.dtype, x.data_ptr() % 16 == 0))
            else:
                found.append((name, x if name in constants or x is None else type(x)))
        return tuple(found)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    found: list[Launch] = []

    def record(kernel: JITFunction, *_: Any, grid: Any, warmup: bool, **arguments: Any) -> None:
        found.append(Launch(kernel, arguments))

    # PyTorch has no product of CPU tensors with results of another dtype, and nothing reads the results of an effect.
    with mock.patch.object(JITFunction, "run", record), mock.patch.object(Recorder, "effect"):
        yield found


def launches_of(
    call: Call, arch: str, forward: Choice = FIRST, backward: Choice | None = FIRST, backend: str = "triton"
) -> list[Launch]:
    """The launches of forward and, unless it is `None`, backward on a GPU, for a call on CPU tensors."""
    with recorded() as found:
        results_of(call, backend, arch, forward, backward)
    return found


def hopper_launches_of(call: Call, forward: Choice = FIRST, backward: Choice = FIRST) -> list[Launch]:
    """The Hopper backend's launches on an H200, for a call on CPU tensors; backward if the backend accepts it."""
    return launches_of(call, "sm_90", forward, backward, backend="hopper")


def results_of(
    call: Call, backend: str, arch: str, forward: Choice = FIRST, backward: Choice | None = FIRST
) -> list[Tensor | None]:
    """`out`, `lse` and the gradients of a call on CPU tensors. Inside `recorded` no kernel fills them."""
    kernels, needs = BACKENDS[backend][1], needs_of(call, backend, arch)
    out, lse = kernels.forward(plan_of(call, backend, arch, None, forward), call)
    if backward is None or needs is None:
        return [out, lse]
    plan = plan_of(call, backend, arch, needs, backward)
    with mock.patch.object(backward_launches, "describe_device", return_value=device_of(arch)):
        return [out, lse, *kernels.backward(plan, call, needs, out, lse, torch.empty_like(out), None).flat()]


def replay_of(call: Call, backend: str, arch: str) -> Callable[[], list[Tensor | None]]:
    """A function that repeats `results_of` from recordings."""
    kernels, needs = BACKENDS[backend][1], needs_of(call, backend, arch)
    forward, (out, lse) = kernels.record_forward(plan_of(call, backend, arch, None), call)
    rows = (out, lse, torch.empty_like(out), None)
    backward, _ = kernels.record_backward(plan_of(call, backend, arch, needs), call, needs, *rows)
    return lambda: [*forward(call), *backward(call, *rows)]


def device_of(arch: str) -> Device:
    return Device("cuda", arch, arch, CORES.get(arch, 100))


def plan_of(call: Call, backend: str, arch: str, needs: Needs | None, choice: Choice = FIRST) -> Plan:
    support, _ = BACKENDS[backend]
    problem, device = Problem.describe(call), device_of(arch)
    reason = support.declines(problem, device)
    assert reason is None, reason
    with mock.patch.object(cost, "ranked", in_order):
        chosen = choice(support.candidates(problem, device, needs))
    return Plan(backend, chosen.tile, chosen.num_splits, ())


def needs_of(call: Call, backend: str, arch: str) -> Needs | None:
    """The gradients that a backend computes of a call; `None` without a backward pass."""
    support, _ = BACKENDS[backend]
    problem, device, t = Problem.describe(call), device_of(arch), call.tensors
    captured = tuple(x.is_floating_point() for x in t.score_mod_tensors)
    needs = Needs(*(getattr(t, name) is not None for name in DIFFERENTIABLE), score_mod_tensors=captured)
    if backend == "hopper":
        needs = needs._replace(bias=False, score_mod_tensors=(False,) * len(captured))
        if support.declines_backward(problem, device, needs) is not None:
            needs = needs._replace(alibi_slopes=False)
    declined = support.declines_backward(problem, device, needs) is not None
    return None if declined or t.leftpad_k is not None else needs
