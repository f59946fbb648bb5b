"""Plans that tests choose, whatever the measured rates are."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

from flashtile.backend.gpu import cost
from flashtile.call.call import Needs
from flashtile.call.device import Device
from flashtile.call.plan import Candidate
from flashtile.call.problem import Problem

Choice = Callable[[list[Candidate]], Candidate]


def in_order(ways: Iterable[tuple[Any, int, Any]], rates: Any) -> list[Candidate]:
    """As `cost.ranked`, in the order of the tables: their first kernels serve all features, and are not split."""
    return [Candidate(tile, splits, 0.0) for tile, splits, _ in ways]


def config_of(tile: Any) -> Any:
    """The configuration of a candidate's pass on Hopper, or those of all kernels."""
    return tile if not hasattr(tile, "backward") else tile.forward or tile.backward


def adds_late(config: Any) -> bool:
    """Whether Hopper's fused backward pass adds dq late."""
    return config.late_dq is not None


def keeps_keys_in_registers(config: Any) -> bool:
    """Whether Hopper's kernel for dk and dv does."""
    return config.dkdv.keys_in_registers


def first(where: Callable[[Any], bool] = lambda _: True, num_splits: int = 1, **changes: Any) -> Choice:
    """The first candidate whose configuration fulfills a condition, with fields of it changed; of the kernel for dk and
    dv, where the backward pass of wide heads on Hopper has two.
    """

    def choose(found: list[Candidate]) -> Candidate:
        fitting = [x for x in found if where(config_of(x.tile))]
        assert fitting, "no such candidate"
        chosen = fitting[0]
        return chosen._replace(tile=changed(chosen.tile), num_splits=num_splits)

    def changed(tile: Any) -> Any:
        if not hasattr(tile, "backward"):
            return tile._replace(**changes)
        if tile.forward is not None:
            return tile._replace(forward=replace(tile.forward, **changes))
        if tile.backward.kind == "fused":
            return tile._replace(backward=replace(tile.backward, **changes))
        return tile._replace(backward=replace(tile.backward, dkdv=replace(tile.backward.dkdv, **changes)))

    return choose


def number(seed: int) -> Choice:
    """Some candidate, another one for another seed."""
    return lambda found: found[seed % len(found)]


def forced(support: ModuleType, forward: Choice = first(), backward: Choice = first()) -> AbstractContextManager[Any]:  # noqa: B008
    """A patch of a backend's `support`, by which its plans are these candidates. It takes plans that are not cached."""
    candidates = support.candidates

    def one(problem: Problem, device: Device, needs: Needs | None) -> list[Candidate]:
        with mock.patch.object(cost, "ranked", in_order):
            found = candidates(problem, device, needs)
        return [(forward if needs is None else backward)(found)]

    return mock.patch.object(support, "candidates", one)
