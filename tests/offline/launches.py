"""The launches that a call makes, recorded instead of run: the product's own tiles and arguments, without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from flashtile.backends.hopper import kernels as hopper
from flashtile.backends.hopper import support as hopper_support
from flashtile.backends.triton import kernels, support
from flashtile.call import Call, Needs
from flashtile.device import Device
from flashtile.plan import Plan
from flashtile.problem import Problem

OPTIONS = ("num_warps", "num_stages")
CORES = {"sm_80": 108, "sm_90": 132}


@dataclass(frozen=True)
class Launch:
    kernel: JITFunction
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__.removesuffix("_kernel")


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    found: list[Launch] = []

    def record(kernel: JITFunction, *_: Any, grid: Any, warmup: bool, **arguments: Any) -> None:
        found.append(Launch(kernel, arguments))

    with mock.patch.object(JITFunction, "run", record):
        yield found


def launches_of(call: Call, arch: str, *, backward: bool = True) -> list[Launch]:
    """What forward and backward of a call on CPU tensors would launch on a GPU."""
    problem = Problem.describe(call)
    device = Device("cuda", arch, arch, CORES.get(arch, 100))
    reason = support.declines(problem, device)
    assert reason is None, reason
    plan = Plan("triton", support.tile(problem, device), support.num_splits(problem, device), ())
    t = call.tensors
    with recorded() as found:
        out, lse = kernels.forward(plan, call)
        if backward and t.leftpad_k is None:
            features = (t.bias is not None, t.alibi_slopes is not None, t.sinks is not None)
            kernels.backward(plan, call, Needs(True, True, True, *features), out, lse, torch.empty_like(out), None)
    return found


def hopper_launches_of(call: Call) -> list[Launch]:
    """What the Hopper backend would launch on an H200 for a call on CPU tensors; backward if it takes that."""
    problem = Problem.describe(call)
    device = Device("cuda", "H200", "sm_90", CORES["sm_90"])
    reason = hopper_support.declines(problem, device)
    assert reason is None, reason
    plan = Plan("hopper", hopper_support.tile(problem, device), 1, ())
    with recorded() as found:
        out, lse = hopper.forward(plan, call)
        needs = Needs(True, True, True, sinks=call.tensors.sinks is not None)
        if hopper_support.declines_backward(problem, device, needs) is None:
            hopper.backward(plan, call, needs, out, lse, torch.empty_like(out), None)
    return found
