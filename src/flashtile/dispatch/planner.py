"""Which backend runs a problem on a device, with what tiles, and why not the others."""

import functools
import importlib
import os
import warnings
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..backend.cpu import support as cpu
from ..backend.hopper import support as hopper
from ..backend.reference import support as reference
from ..backend.tiled import support as tiled
from ..backend.triton import support as triton
from ..call.call import Call, Needs
from ..call.device import Device, describe_device, host_readable
from ..call.plan import Plan
from ..call.problem import Problem
from ..errors import AttentionWarning, BackendError
from ..remember import remember

# Fastest first. `auto` takes the first that accepts the problem; it never takes `reference`, which is there to compare.
SUPPORT: dict[str, Any] = {
    "hopper": hopper, "triton": triton, "cpu": cpu, "tiled": tiled, "reference": reference,
}  # fmt: skip
AUTO = ("hopper", "triton", "cpu", "tiled")
BACKEND_VARIABLE = "FLASHTILE_BACKEND"
MOST_PLANS = 4096

# Where os.environ looks a name up. It raises an error where there is none, which takes longer than all of the lookup.
_ENVIRONMENT: Any = getattr(os.environ, "_data", os.environ)
_VARIABLE: Any = os.environ.encodekey(BACKEND_VARIABLE) if hasattr(os.environ, "_data") else BACKEND_VARIABLE


@functools.cache
def entry_of(backend: str) -> ModuleType:
    return importlib.import_module(f"flashtile.backend.{backend}.entry")


class BackendStatus(NamedTuple):
    """One backend on this machine.

    Attributes:
        name: what `backend=` takes.
        usable: whether it can run here.
        reason: why it cannot, or `None`.
        summary: one line about it.
    """

    name: str
    usable: bool
    reason: str | None
    summary: str


def backends() -> tuple[BackendStatus, ...]:
    """Every backend, fastest first: whether it is usable on this machine, and why not.

    A usable backend may still decline a call; `flashtile.explain` says so for the call at hand.

    Example:
        >>> [status.name for status in flashtile.backends()]
        ['hopper', 'triton', 'cpu', 'tiled', 'reference']

    Returns:
        One `BackendStatus` for each.
    """
    return tuple(
        BackendStatus(
            name, (reason := support.unusable() or optional(support, "misconfigured")) is None, reason, support.SUMMARY
        )
        for name, support in SUPPORT.items()
    )


_PLANS: dict[Any, Plan] = {}


def forget_plans() -> None:
    """Plan every problem anew: for tests that change what a support module says."""
    _PLANS.clear()
    _plan.cache_clear()


def plan(problem: Problem, device: torch.device, backend: str = "auto", *, needs: Needs | None = None) -> Plan:
    """The plan of a problem's forward pass, or of a backward pass for the gradients that `needs` asks for. It is cached
    by the problem's bucket.

    Raises:
        BackendError: the named backend does not exist or declines the problem, or a variable of the environment asks
            for what does not exist. A backend is never replaced by another.
    """
    asked_by = "`backend`"
    if backend == "auto":
        backend, asked_by = os.environ.get(BACKEND_VARIABLE, "auto"), BACKEND_VARIABLE
    if backend != "auto" and backend not in SUPPORT:
        known = {name: support.SUMMARY for name, support in SUPPORT.items()}
        accepted = f"'auto', {', '.join(map(repr, SUPPORT))}"
        raise BackendError(f"{asked_by} is {backend!r}. Accepted: {accepted}", known, works="tiled")
    chosen = _plan(problem.bucketed(), describe_device(device), backend, needs)
    if (wrong := optional(SUPPORT[chosen.backend], "misconfigured")) is not None:
        raise BackendError(wrong, {}, works="tiled")
    return chosen


def plan_call(call: Call, *, needs: Needs | None = None) -> Plan:
    """The plan of a call that is about to run, which warns once if an accelerator gets nothing faster than `tiled`.

    Raises:
        ArgumentError, BackendError: as `Problem.describe` and `plan` do.
    """
    chosen = _plan_of_signature(call, needs)
    if chosen.backend == "tiled" and call.settings.backend == "auto" and call.tensors.q.device.type != "cpu":
        _warn_once(f"attention on {call.tensors.q.device} runs in the `tiled` backend, which is slow", chosen.why)
    return chosen


def _plan_of_signature(call: Call, needs: Needs | None) -> Plan:
    q, backend = call.tensors.q, call.settings.backend
    if call.layout != "dense" and host_readable(q):  # whose lengths are checked, and say how long the call is
        return plan(Problem.describe(call.attention()), q.device, backend, needs=needs)
    # Nothing reads the tensors: calls of one signature have one plan, and pass or fail alike.
    variable = _ENVIRONMENT.get(_VARIABLE) if backend == "auto" else None
    key = (call.signature(), needs, variable, torch.get_num_threads())
    chosen = _PLANS.get(key)
    if chosen is None:
        chosen = plan(Problem.describe(call.attention()), q.device, backend, needs=needs)
        remember(_PLANS, key, chosen, MOST_PLANS)
    return chosen


@functools.lru_cache(maxsize=1024)
def _plan(problem: Problem, device: Device, backend: str, needs: Needs | None) -> Plan:
    reasons: dict[str, str] = {}
    for name in AUTO if backend == "auto" else (backend,):
        support = SUPPORT[name]
        reason = support.unusable() or support.declines(problem, device)
        if reason is None and needs is not None:
            reason = optional(support, "declines_backward", problem, device, needs)
        if reason is None and backend == "auto":
            reason = optional(support, "yields", problem, device)
        if reason is None:
            splits = support.num_splits(problem, device)
            return Plan(name, support.tile(problem, device), splits, tuple(reasons.items()))
        reasons[name] = reason
    asked = "no backend takes this call" if backend == "auto" else f"backend {backend!r} does not take this call"
    raise BackendError(f"{asked}: {problem} on {device.name}", reasons)


def optional(support: Any, question: str, *about: Any) -> str | None:
    """The answer to a question that not every support module is asked."""
    return getattr(support, question)(*about) if hasattr(support, question) else None


@functools.cache
def _warn_once(message: str, why: tuple[tuple[str, str], ...]) -> None:
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in why)
    warnings.warn(message + reasons, AttentionWarning, stacklevel=2)
