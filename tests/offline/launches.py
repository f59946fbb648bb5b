"""Record the launches of a call, with the shipped tiles and arguments, instead of running them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from flashtile.backend.hopper import backward_launches
from flashtile.backend.hopper import entry as hopper_kernels
from flashtile.backend.hopper import support as hopper_support
from flashtile.backend.triton import entry as triton_kernels
from flashtile.backend.triton import support as triton_support
from flashtile.call.call import DIFFERENTIABLE, Call, Needs
from flashtile.call.device import Device
from flashtile.call.plan import Plan
from flashtile.call.problem import Problem

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

    with mock.patch.object(JITFunction, "run", record):
        yield found


def launches_of(call: Call, arch: str, *, backward: bool = True) -> list[Launch]:
    """The launches of forward and backward on a GPU, for a call on CPU tensors."""
    with recorded() as found:
        results_of(call, "triton", arch, backward=backward)
    return found


def hopper_launches_of(call: Call) -> list[Launch]:
    """The Hopper backend's launches on an H200, for a call on CPU tensors; backward if the backend accepts it."""
    with recorded() as found:
        results_of(call, "hopper", "sm_90")
    return found


def results_of(call: Call, backend: str, arch: str, *, backward: bool = True) -> list[Tensor | None]:
    """`out`, `lse` and the gradients of a call on CPU tensors. Inside `recorded` no kernel fills them."""
    kernels, plan, needs = planned(call, backend, arch)
    out, lse = kernels.forward(plan, call)
    if not backward or needs is None:
        return [out, lse]
    with mock.patch.object(backward_launches, "describe_device", return_value=device_of(arch)):
        return [out, lse, *kernels.backward(plan, call, needs, out, lse, torch.empty_like(out), None).flat()]


def replay_of(call: Call, backend: str, arch: str) -> Callable[[], list[Tensor | None]]:
    """A function that repeats `results_of` from recordings."""
    kernels, plan, needs = planned(call, backend, arch)
    forward, (out, lse) = kernels.record_forward(plan, call)
    rows = (out, lse, torch.empty_like(out), None)
    backward, _ = kernels.record_backward(plan, call, needs, *rows)
    return lambda: [*forward(call), *backward(call, *rows)]


def device_of(arch: str) -> Device:
    return Device("cuda", arch, arch, CORES.get(arch, 100))


def planned(call: Call, backend: str, arch: str) -> tuple[Any, Plan, Needs | None]:
    """The backend's entry, a plan, and the gradients that it computes; `None` without a backward pass."""
    support, kernels = BACKENDS[backend]
    problem, device = Problem.describe(call), device_of(arch)
    reason = support.declines(problem, device)
    assert reason is None, reason
    plan = Plan(backend, support.tile(problem, device), support.num_splits(problem, device), ())
    t = call.tensors
    captured = tuple(x.is_floating_point() for x in t.score_mod_tensors)
    needs = Needs(*(getattr(t, name) is not None for name in DIFFERENTIABLE), score_mod_tensors=captured)
    if backend == "hopper":
        needs = needs._replace(bias=False, score_mod_tensors=(False,) * len(captured))
        if support.declines_backward(problem, device, needs) is not None:
            needs = needs._replace(alibi_slopes=False)
        if support.declines_backward(problem, device, needs) is not None:
            return kernels, plan, None
    return kernels, plan, None if t.leftpad_k is not None else needs
