"""The launches of a call on a GPU that is not in this machine: plans by architecture, tensors without values."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..api.explain import described_call
from ..api.normalize import normalize
from ..backend.gpu.replay import Launch
from ..call.cache import CacheCall
from ..call.cache_tensors import CacheTensors, RotarySettings
from ..call.call import DIFFERENTIABLE, Call, Needs
from ..call.device import Device
from ..call.plan import Plan
from ..call.problem import Problem
from ..dispatch.launches import launches_of, on_meta
from ..dispatch.planner import declines_on_device, fastest
from .standard import StandardCall

BACKENDS = ("hopper", "triton")
CORES = {"sm_80": 108, "sm_90": 132, "sm_100": 148}


def device_of(arch: str) -> Device:
    return Device("cuda", arch, arch, CORES.get(arch, 128))


def launches(standard: StandardCall, device: Device) -> list[Launch]:
    """The launches of a call on a device.

    Raises:
        LookupError: none of the GPU backends takes it.
    """
    call = call_of(standard)
    problem = Problem.describe(call.attention() if isinstance(call, CacheCall) else call)
    backward = None
    if standard.backward:
        wanted = ("q", "k", "v", *standard.differentiated)
        needs = Needs(*(name in wanted for name in DIFFERENTIABLE))
        backward = (plan_of(problem, device, needs), needs)
    return launches_of(call, device, plan_of(problem, device, None), backward)


def plan_of(problem: Problem, device: Device, needs: Needs | None) -> Plan:
    """The plan that `auto` makes on a device of the backends that have kernels."""
    problem = problem.bucketed()

    def declines(name: str, needs: Needs | None) -> str | None:
        return declines_on_device(name, problem, device, needs)

    chosen, _ = fastest(BACKENDS, declines, problem, device, needs)
    if chosen is not None:
        return chosen
    raise LookupError(f"no kernel takes {problem} on {device.arch}")


def call_of(standard: StandardCall) -> Call:
    """The normalised call."""
    tensors = {name: x for name, x in standard.arguments.items() if isinstance(x, Tensor)}
    apart = dict(zip(tensors, on_meta(tensors.values()), strict=True))  # at addresses of their own
    arguments: dict[str, Any] = standard.arguments | apart
    if standard.function != "attention_with_kvcache":
        positional = [arguments.pop(name, None) for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]
        return described_call(*positional, arguments)  # type: ignore[arg-type]
    cache = CacheTensors(**{name: arguments.pop(name, None) for name in CacheTensors._fields})
    named = {"q": arguments.pop("q"), "k": cache.k_cache, "v": cache.v_cache}
    named |= {name: arguments.pop(name, None) for name in ("mask", "bias", "alibi_slopes", "sinks", "cu_seqlens_q")}
    rotary = RotarySettings(interleaved=arguments.pop("rotary_interleaved", True))
    scalars: dict[str, Any] = dict.fromkeys(("window", "scale", "softcap", "score_mod", "dropout_seed", "num_splits"))
    scalars |= {"causal": False, "dropout_p": 0.0, "deterministic": None, "backend": "auto", **arguments}
    call = normalize("attention_with_kvcache", named, cache=cache, **scalars)
    return CacheCall(call, cache, rotary)


def all_launches(calls: Iterator[StandardCall], device: Device) -> Iterator[Launch]:
    """The launches of all calls, on PyTorch's defaults."""
    with torch.no_grad():
        for call in calls:
            yield from launches(call, device)
