"""The launches of a call on a GPU that is not in this machine: plans by architecture, tensors without values."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..api.explain import described_call
from ..api.normalize import normalize
from ..backend.gpu.replay import Launch
from ..backend.rate_files import rate_files
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
QKV = Needs(True, True, True)
OF_CALLS = ("mask", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "q_descale")  # tensors that are not a cache's
TYPICAL = {  # multiprocessors, MHz, and bytes of memory in a microsecond of a usual chip: 0 for that of the rates
    "sm_80": (108, 0.0, 0.0), "sm_86": (84, 1695.0, 7.0e5), "sm_89": (142, 2520.0, 8.64e5), "sm_90": (132, 0.0, 0.0),
    "sm_100": (148, 1965.0, 8.0e6), "sm_120": (170, 2407.0, 1.79e6),
}  # fmt: skip


def device_of(arch: str) -> Device:
    """A chip of an architecture, for plans without one at hand."""
    return Device("cuda", arch, arch, *TYPICAL.get(arch, (128, 0.0, 0.0)))


def devices_of(arch: str) -> list[Device]:
    """The chips of an architecture whose plans an archive has: those that were measured, or a typical one. Another
    architecture's chip that ran its kernels (`--as-arch`) is none.
    """
    chips = [file["chip"] for _, file in rate_files() if file["chip"]["arch"] == arch]
    chips = [chip for chip in chips if not chip["name"].startswith(f"{arch} on ")]
    fields = ("name", "arch", "cores", "clock", "bandwidth")
    return [Device("cuda", *(chip[name] for name in fields)) for chip in chips] or [device_of(arch)]


Planner = Callable[[Problem, Device, Needs | None], Plan]


def launches(standard: StandardCall, device: Device, planner: Planner | None = None) -> list[Launch]:
    """The launches of a call on a device, by plans of `plan_of` or another `planner`.

    Raises:
        LookupError: none of the GPU backends takes it.
    """
    call = call_of(standard)
    problem = Problem.describe(call.attention() if isinstance(call, CacheCall) else call)
    backward, planner = None, planner or plan_of
    if standard.backward:
        wanted = ("q", "k", "v", *standard.differentiated)
        needs = Needs(*(name in wanted for name in DIFFERENTIABLE))
        backward = (planner(problem, device, needs), needs)
    along = (plan_of(problem, device, None, QKV), QKV) if standard.along else None
    return launches_of(call, device, planner(problem, device, None), backward, along)


def plan_of(problem: Problem, device: Device, needs: Needs | None, moves: Needs | None = None) -> Plan:
    """The plan that `auto` makes on a device of the backends that have kernels."""
    problem = problem.bucketed()

    def declines(name: str, needs: Needs | None) -> str | None:
        return declines_on_device(name, problem, device, needs, moves)

    chosen, _ = fastest(BACKENDS, declines, problem, device, needs, moves)
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
    if (v_dim := arguments.get("v_dim")) is not None:
        cache = cache._replace(v_cache=cache.k_cache[..., :v_dim], v_descale=cache.k_descale)
    named = {"q": arguments.pop("q"), "k": cache.k_cache, "v": cache.v_cache}
    named |= {name: arguments.pop(name, None) for name in OF_CALLS}
    rotary = RotarySettings(interleaved=arguments.pop("rotary_interleaved", True))
    scalars: dict[str, Any] = dict.fromkeys(("window", "scale", "softcap", "score_mod", "dropout_seed", "num_splits"))
    scalars |= {"causal": False, "dropout_p": 0.0, "deterministic": None, "backend": "auto", **arguments}
    call = normalize("attention_with_kvcache", named, cache=cache, **scalars)
    return CacheCall(call, cache, rotary)


def all_launches(calls: Iterator[StandardCall], device: Device) -> Iterator[Launch]:
    """The launches of all calls, on PyTorch's defaults. Those that differ only before attention have one plan."""
    planner = functools.cache(plan_of)
    with torch.no_grad():
        for call in calls:
            yield from launches(call, device, planner)
