"""Which backend runs a problem on a device, with what tiles, and why not the others."""

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..backend.cpu import support as cpu
from ..backend.hopper import support as hopper
from ..backend.reference import support as reference
from ..backend.tiled import support as tiled
from ..backend.triton import support as triton
from ..call import counting
from ..call.cache import CacheCall
from ..call.call import Call, Needs
from ..call.device import Device, describe_device
from ..call.plan import Plan, Rest
from ..call.problem import Problem
from ..call.words import in_words
from ..errors import AttentionWarning, BackendError

# Fastest first. `auto` takes the first that accepts the problem; it never takes `reference`, which is there to compare.
SUPPORT: dict[str, Any] = {
    "hopper": hopper, "triton": triton, "cpu": cpu, "tiled": tiled, "reference": reference,
}  # fmt: skip
AUTO = ("hopper", "triton", "cpu", "tiled")
BACKEND_VARIABLE = "FLASHTILE_BACKEND"


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


def forget_plans() -> None:
    """Plan every problem anew."""
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
    """The plan of a call that is about to run. Warns once if nothing faster than `tiled` takes it on an accelerator, or
    because a score_mod or mask function cannot be traced.

    Raises:
        ArgumentError, BackendError: as `Problem.describe` and `plan` do.
    """
    device = call.tensors.q.device
    problem = Problem.describe(call.attention())
    chosen = plan(problem, device, call.settings.backend, needs=needs)
    if chosen.backend == "tiled" and call.settings.backend == "auto" and is_slow(chosen, problem, device, needs):
        _warn_once(f"attention on {device} runs in the `tiled` backend, which is slow", chosen.why)
    return chosen


def count(call: Call, chosen: Plan, direction: str) -> None:
    """Add a pass that has run to the open counts (`flashtile.calls`)."""
    why = [f"not {name}: {reason}" for name, reason in chosen.why]
    if call.settings.backend != "auto":
        why.append("named by `backend`")
    elif os.environ.get(BACKEND_VARIABLE, "auto") != "auto":
        why.append(f"named by {BACKEND_VARIABLE}")
    if chosen.rest is not None:
        why += [f"gradient of {name}: {backend}" for name, backend in chosen.rest.in_words().items()]
    layout = "attention" if call.layout == "dense" else "attention_varlen"
    function = "attention_with_kvcache" if isinstance(call, CacheCall) else layout
    counting.add(function, direction, chosen.backend, tuple(why))


def is_slow(chosen: Plan, problem: Problem, device: torch.device, needs: Needs | None) -> bool:
    """Whether `tiled` takes a problem because no faster backend can, and not because one leaves it to it."""

    def can(name: str) -> bool:
        usable = SUPPORT[name].unusable() is None
        return usable and declines_on_device(name, problem, describe_device(device), needs, auto=False) is None

    if device.type == "cpu":
        return problem.untraced is not None
    return not any(can(name) for name, _ in chosen.why)


@functools.lru_cache(maxsize=1024)
def _plan(problem: Problem, device: Device, backend: str, needs: Needs | None) -> Plan:

    def declines(name: str, needs: Needs | None) -> str | None:
        support = SUPPORT[name]
        reason = support.unusable() or declines_on_device(name, problem, device, needs, auto=backend == "auto")
        if reason is None and (unknown := optional(support, "unknown_kernels", problem, device, needs)) is not None:
            from . import self_check  # starts processes: not needed by `import flashtile`

            reason = self_check.failure(name, unknown, device.arch)
        return reason

    chosen, reasons = first(AUTO if backend == "auto" else (backend,), declines, problem, device, needs)
    if chosen is not None:
        return chosen
    asked = "no backend takes this call" if backend == "auto" else f"backend {backend!r} does not take this call"
    raise BackendError(f"{asked}: {in_words(problem, lengths=False)}, on {device.name}", reasons)


def first(
    names: Sequence[str],
    declines: Callable[[str, Needs | None], str | None],
    problem: Problem,
    device: Device,
    needs: Needs | None,
) -> tuple[Plan | None, dict[str, str]]:
    """The plan with the first backend that `declines` gives no reason against, and the reasons of those before it.

    Of several backends, one that lacks only gradients of tensors that change scores leaves those to the next.
    """
    reasons: dict[str, str] = {}
    for n, name in enumerate(names):
        reason, rest = declines(name, needs), None
        if reason is not None and needs is not None and any((own := needs.of_rows()).flat()):
            others = needs.of_score_tensors()
            if names[n + 1 :] and any(others.flat()) and declines(name, own) is None:
                others_plan, _ = first(names[n + 1 :], declines, problem, device, others)
                rest = None if others_plan is None else Rest(own, others, others_plan)
        if reason is None or rest is not None:
            support = SUPPORT[name]
            splits = support.num_splits(problem, device)
            return Plan(name, support.tile(problem, device), splits, tuple(reasons.items()), rest), reasons
        reasons[name] = reason
    return None, reasons


def declines_on_device(name: str, problem: Problem, device: Device, needs: Needs | None, *, auto: bool) -> str | None:
    """Why a backend does not run a pass on a device, whatever is installed; with `auto`, also why it should not."""
    support = SUPPORT[name]
    reason = support.declines(problem, device)
    if reason is None and needs is not None:
        reason = optional(support, "declines_backward", problem, device, needs)
    if reason is None and auto:
        reason = optional(support, "defers", problem, device, needs)
    return reason


def optional(support: Any, question: str, *about: Any) -> str | None:
    """The answer to a question that not every support module is asked."""
    return getattr(support, question)(*about) if hasattr(support, question) else None


@functools.cache
def _warn_once(message: str, why: tuple[tuple[str, str], ...]) -> None:
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in why)
    warnings.warn(message + reasons, AttentionWarning, stacklevel=2)
