"""Which backend runs a problem on a device, with what tiles, and why not the others."""

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

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
from ..call.plan import Candidate, Plan, Rest
from ..call.problem import Problem
from ..call.words import in_words
from ..errors import AttentionWarning, BackendError

# `auto` takes the one that is expected to be the fastest; it never takes `reference`, which is there to compare.
SUPPORT: dict[str, Any] = {
    "hopper": hopper, "triton": triton, "cpu": cpu, "tiled": tiled, "reference": reference,
}  # fmt: skip
AUTO = ("hopper", "triton", "cpu", "tiled")
BACKEND_VARIABLE = "FLASHTILE_BACKEND"


def forget_plans() -> None:
    """Plan every problem anew."""
    _plan.cache_clear()


def plan(
    problem: Problem,
    device: torch.device,
    backend: str = "auto",
    *,
    needs: Needs | None = None,
    moves: Needs | None = None,
) -> Plan:
    """The plan of a problem's forward pass, of a backward pass for the gradients that `needs` asks for, of a forward
    pass with the tangents of the inputs that `moves` names, or with both of the gradients of these tangents. It is
    cached by the problem's bucket.

    Raises:
        BackendError: the named backend does not exist or declines the problem, or a variable of the environment asks
            for what does not exist. A backend is never replaced by another, but for tangents, which a named backend
            leaves to the next one that has them.
    """
    asked_by = "`backend`"
    if backend == "auto":
        backend, asked_by = os.environ.get(BACKEND_VARIABLE, "auto"), BACKEND_VARIABLE
    if backend != "auto" and backend not in SUPPORT:
        known = {name: support.SUMMARY for name, support in SUPPORT.items()}
        accepted = f"'auto', {', '.join(map(repr, SUPPORT))}"
        raise BackendError(f"{asked_by} is {backend!r}. Accepted: {accepted}", known, works="tiled")
    chosen = _plan(problem.bucketed(), describe_device(device), backend, needs, moves)
    if (wrong := optional(SUPPORT[chosen.backend], "misconfigured")) is not None:
        raise BackendError(wrong, {}, works="tiled")
    return chosen


def plan_call(call: Call, *, needs: Needs | None = None, moves: Needs | None = None) -> Plan:
    """The plan of a call that is about to run. Warns once if nothing faster than `tiled` takes it on an accelerator, or
    because a score_mod or mask function cannot be traced.

    Raises:
        ArgumentError, BackendError: as `Problem.describe` and `plan` do.
    """
    device = call.tensors.q.device
    problem = Problem.describe(call.attention())
    chosen = plan(problem, device, call.settings.backend, needs=needs, moves=moves)
    named = call.settings.backend == "tiled"
    if chosen.backend == "tiled" and not named and is_slow(chosen, problem, device, needs, moves):
        work = "attention" if moves is None else f"{derivative(needs)} of attention"
        _warn_once(f"{work} on {device} runs in the `tiled` backend, which is slow", chosen.why)
    return chosen


def is_declined(call: Call) -> bool:
    """Whether no backend takes a call, or the named one does not."""
    try:
        plan_call(call)
    except BackendError:
        return True
    return False


def derivative(needs: Needs | None) -> str:
    """What a pass along tangents is called."""
    return "forward mode" if needs is None else "a second derivative"


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


def is_slow(
    chosen: Plan, problem: Problem, device: torch.device, needs: Needs | None, moves: Needs | None = None
) -> bool:
    """Whether `tiled` takes a problem because no other backend can, not because it is faster than those."""

    def can(name: str) -> bool:
        usable = SUPPORT[name].unusable() is None
        return usable and declines_on_device(name, problem, describe_device(device), needs, moves) is None

    if device.type == "cpu":
        return problem.untraced is not None
    return not any(can(name) for name, _ in chosen.why)


@functools.lru_cache(maxsize=1024)
def _plan(problem: Problem, device: Device, backend: str, needs: Needs | None, moves: Needs | None) -> Plan:

    def declines(name: str, needs: Needs | None) -> str | None:
        support = SUPPORT[name]
        reason = support.unusable() or declines_on_device(name, problem, device, needs, moves)
        if reason is None and (unknown := optional(support, "unknown_kernels", problem, device, needs)) is not None:
            from . import self_check  # starts processes: not needed by `import flashtile`

            reason = self_check.failure(name, unknown, device.arch)
        return reason

    names = AUTO if backend == "auto" else (backend,)
    if backend != "auto" and moves is not None:
        names = with_tangents_after(backend, lambda name: declines(name, needs) is None)
    chosen, reasons = fastest(names, declines, problem, device, needs, moves)
    if chosen is not None:
        return chosen
    asked = "no backend takes this call" if backend == "auto" else f"backend {backend!r} does not take this call"
    raise BackendError(f"{asked}: {in_words(problem, lengths=False)}, on {device.name}", reasons)


def fastest(
    names: Sequence[str],
    declines: Callable[[str, Needs | None], str | None],
    problem: Problem,
    device: Device,
    needs: Needs | None,
    moves: Needs | None = None,
) -> tuple[Plan | None, dict[str, str]]:
    """The plan with the least expected time, of the backends that `declines` gives no reason against; and why it is not
    one of those before it.

    Of several backends, one that lacks only gradients of tensors that change scores leaves those to another.
    """
    reasons: dict[str, str] = {}
    plans: list[Plan] = []
    for n, name in enumerate(names):
        own, rest = needs, None
        reason = declines(name, needs)
        if reason is not None and needs is not None and moves is None and any((rows := needs.of_rows()).flat()):
            others = needs.of_score_tensors()
            if names[n + 1 :] and any(others.flat()) and declines(name, rows) is None:
                others_plan, _ = fastest(names[n + 1 :], declines, problem, device, others)
                if others_plan is not None:
                    own, rest = rows, Rest(rows, others, others_plan)
        if reason is None or rest is not None:
            way = candidates_of(name, problem, device, own, moves)[0]
            plans.append(Plan(name, way.tile, way.num_splits, (), rest, way.microseconds))
            if way.microseconds <= 0.0 or problem.batch_invariant:
                break  # nothing takes less, or expected times, which follow from the batch, do not count
        else:
            reasons[name] = reason
    if not plans:
        return None, reasons
    chosen = min(plans, key=lambda plan: plan.microseconds)
    slower = {x.backend: f"expected to take {x.microseconds:.3g} us, here {chosen.microseconds:.3g}" for x in plans}
    before = names[: names.index(chosen.backend)]
    return chosen._replace(why=tuple((name, (reasons | slower)[name]) for name in before)), reasons


def with_tangents_after(backend: str, takes: Callable[[str], bool]) -> tuple[str, ...]:
    """The backends up to the one that computes the tangents of a call that names one: that one, else the first after it
    that takes them.
    """
    names = AUTO[AUTO.index(backend) :] if backend in AUTO else (backend, "tiled")
    first = next((n for n, name in enumerate(names) if takes(name)), len(names))
    return names[: first + 1]


def declines_on_device(
    name: str, problem: Problem, device: Device, needs: Needs | None, moves: Needs | None = None
) -> str | None:
    """Why a backend does not run a pass on a device, whatever is installed."""
    support = SUPPORT[name]
    reason = support.declines(problem, device)
    if reason is None and needs is not None:
        reason = optional(support, "declines_backward", problem, device, needs)
    if reason is None and moves is not None:
        if problem.batch_invariant:
            return f"{derivative(needs)} has other kernels, whose bits are not those of a batch-invariant call"
        if not hasattr(support, "tangent_candidates" if needs is None else "second_candidates"):
            return f"it has no kernel of {derivative(needs)}"
        reason = optional(support, "declines_tangents", problem, device, moves)
        if reason is None and needs is not None:
            reason = optional(support, "declines_second", problem, device, moves, needs)
    return reason  # type: ignore[no-any-return]


def candidates_of(
    name: str, problem: Problem, device: Device, needs: Needs | None, moves: Needs | None = None
) -> list[Candidate]:
    """The ways to run a pass by one backend, the fastest first."""
    support = SUPPORT[name]
    if moves is not None and needs is not None:
        return support.second_candidates(problem, device, moves, needs)  # type: ignore[no-any-return]
    if moves is not None:
        return support.tangent_candidates(problem, device, moves)  # type: ignore[no-any-return]
    return support.candidates(problem, device, needs)  # type: ignore[no-any-return]


def candidates(
    problem: Problem, device: Device, needs: Needs | None, moves: Needs | None = None
) -> list[tuple[str, Candidate]]:
    """The ways to run a pass by all backends that `auto` may take on a device, the fastest first."""
    found = list[tuple[str, Candidate]]()
    for name in AUTO:
        if SUPPORT[name].unusable() is None and declines_on_device(name, problem, device, needs, moves) is None:
            timed = None if moves is not None else getattr(SUPPORT[name], "timed_candidates", None)
            ways = timed(problem, device, needs) if timed else candidates_of(name, problem, device, needs, moves)
            found += [(name, way) for way in ways]
    return sorted(found, key=lambda x: x[1].microseconds)


def optional(support: Any, question: str, *about: Any) -> str | None:
    """The answer to a question that not every support module is asked."""
    return getattr(support, question)(*about) if hasattr(support, question) else None


@functools.cache
def _warn_once(message: str, why: tuple[tuple[str, str], ...]) -> None:
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in why)
    warnings.warn(message + reasons, AttentionWarning, stacklevel=2)
