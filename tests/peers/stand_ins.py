"""Small `pytest` and `einops` for the peers' test files, so that a machine needs neither."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor


class SkippedError(Exception):
    """A test has skipped its case."""


class Parameters(list[tuple[list[str], list[Any]]]):
    """The names and values of a test's parameters, and whether it runs here at all."""

    runs = True

    def cases(self) -> Iterator[dict[str, Any]]:
        for chosen in product(*(values for _, values in self)):
            yield self.case(chosen)

    def case(self, chosen: Iterable[Any]) -> dict[str, Any]:
        case: dict[str, Any] = {}
        for (names, _), value in zip(self, chosen, strict=True):
            case |= dict(zip(names, value if len(names) > 1 else (value,), strict=True))
        return case


def parameters_of(test: Any) -> Parameters:
    if not hasattr(test, "parameters"):
        test.parameters = Parameters()
    return test.parameters


def parametrize(names: str | list[str], values: Iterable[Any], **_: Any) -> Callable[[Any], Any]:
    def mark(test: Any) -> Any:
        split = re.split(r"\s*,\s*", names) if isinstance(names, str) else list(names)
        parameters_of(test).append((split, list(values)))
        return test

    return mark


def skipif(condition: bool, **_: Any) -> Callable[[Any], Any]:
    def mark(test: Any) -> Any:
        parameters_of(test).runs &= not condition
        return test

    return mark


def skip(*_: Any, **__: Any) -> None:
    raise SkippedError


@contextmanager
def raises(kinds: Any, match: str = "") -> Iterator[None]:
    caught = ""
    caught = ""
    try:
        yield
    except kinds as error:
        caught = str(error)
    else:
        raise AssertionError(f"{kinds} was not raised")
    assert re.search(match, caught), f"{caught} does not match {match}"


def pytest() -> ModuleType:
    module = ModuleType("pytest")
    vars(module).update(skip=skip, xfail=skip, raises=raises)
    vars(module)["mark"] = SimpleNamespace(parametrize=parametrize, skipif=skipif)
    return module


def einops() -> ModuleType:
    module = ModuleType("einops")
    vars(module).update(rearrange=rearrange, repeat=rearrange)
    return module


def rearrange(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """`einops.rearrange` and `einops.repeat` for patterns of names, numbers, groups in parentheses and an ellipsis."""
    before, after = pattern.split("->")
    rest = x.dim() - sum(group != ELLIPSIS for group in groups_of(before, ELLIPSIS))
    names = " ".join(f"rest{n}" for n in range(rest))
    left, right = groups_of(before, names), groups_of(after, names)
    for group, size in zip(left, x.shape, strict=True):
        unknown = [name for name in group if name not in sizes and not name.isdigit()]
        known = math.prod(sizes[name] for name in group if name in sizes)
        sizes |= dict.fromkeys(unknown, size // known)
    order = [name for group in left for name in group if not name.isdigit()]  # a dimension of 1 goes
    x = x.reshape([sizes[name] for name in order])
    flat = [name for group in right for name in group]
    x = x.permute([order.index(name) for name in flat if name in order])
    for n, name in enumerate(flat):
        if name not in order:
            x = x.unsqueeze(n).expand(*x.shape[:n], length(name, sizes), *x.shape[n:])
    return x.reshape([math.prod(length(name, sizes) for name in group) for group in right])


def length(name: str, sizes: dict[str, int]) -> int:
    return int(name) if name.isdigit() else sizes[name]


def groups_of(side: str, ellipsis: str | list[str]) -> list[Any]:
    """The names of each dimension; what stands for an ellipsis is text, or a mark."""
    if isinstance(ellipsis, str):
        side = side.replace("...", ellipsis)
    found = re.findall(r"\([^)]*\)|\S+", side)
    return [ellipsis if group == "..." else group.strip("()").split() for group in found]


ELLIPSIS = ["..."]
