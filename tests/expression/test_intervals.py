"""Interval arithmetic, against all values of all small intervals."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashtile.expression.blocks import intervals
from flashtile.expression.blocks.intervals import Interval
from flashtile.expression.operations import OPERATIONS
from flashtile.expression.torch_code import TorchEmitter

VALUES = torch.arange(-5, 6)
PAIRS = torch.tensor(list(itertools.combinations_with_replacement(VALUES.tolist(), 2)))
FIRST, SECOND = (PAIRS[n.flatten()] for n in torch.meshgrid(*[torch.arange(len(PAIRS))] * 2, indexing="ij"))
A, B = Interval(*FIRST.unbind(1)), Interval(*SECOND.unbind(1))
TRUTHS = Interval(torch.tensor([False, False, True]), torch.tensor([False, True, True]))


def has(x: Interval) -> Tensor:
    """Whether each interval has each value, `[intervals, values]`."""
    return (x.low[:, None] <= VALUES) & (x.high[:, None] >= VALUES)


def results(name: str) -> Tensor:
    """An operation's result for each two values, as kernels compute it."""
    if name in ("floordiv", "mod"):
        emitter = TorchEmitter([VALUES] * 5, (), torch.float32)
        return getattr(emitter, name)(VALUES[:, None], VALUES, False)
    operands = (VALUES[:, None],) if name in ("neg", "abs", "sign", "not_") else (VALUES[:, None], VALUES)
    return OPERATIONS[name].torch(*operands).expand(len(VALUES), len(VALUES))


@pytest.mark.parametrize("name", [*intervals.ARITHMETIC, *intervals.COMPARISONS])
def test_numbers(name: str) -> None:
    """All results lie within the bounds, which are exact but for remainders, bits and divisors of any sign."""
    fn: Callable[..., Interval] = (intervals.ARITHMETIC | intervals.COMPARISONS)[name]
    unary = name in ("neg", "abs", "sign", "not_")
    found = fn(A) if unary else fn(A, B)
    exists = has(A)[:, :, None] & has(B)[:, None, :]
    low = torch.where(exists, results(name).long(), 99).amin((1, 2))
    high = torch.where(exists, results(name).long(), -99).amax((1, 2))
    assert (found.low.long() <= low).all()
    assert (found.high.long() >= high).all()
    tight = torch.full_like(low, name not in ("mod", "and_"), dtype=torch.bool)
    if name == "floordiv":
        tight = B.low > 0
    assert (found.low.long() == low)[tight].all()
    assert (found.high.long() == high)[tight].all()


def test_remainders() -> None:
    """Whether a remainder occurs is exact for one divisor and one remainder."""
    x = Interval(*PAIRS.unbind(1))
    for c in range(1, 6):
        for r in range(c):
            found = intervals.has_remainder(x, *(intervals.point(torch.tensor(n)) for n in (c, r)))
            assert torch.equal(found, (has(x) & (VALUES % c == r)).any(1))
    several, one, four = Interval(torch.tensor(2), torch.tensor(3)), *(torch.tensor(n) for n in (1, 4))
    assert intervals.has_remainder(intervals.point(four), several, intervals.point(one))
    far = intervals.point(torch.tensor(-(2**63)))
    assert intervals.has_remainder(far, intervals.point(four), intervals.point(one))


@pytest.mark.parametrize("name", intervals.MIRRORED)
def test_narrowed(name: str) -> None:
    """The values for which a comparison holds with any value of the other interval, and no others."""
    found = intervals.narrowed(name, A, B)
    holds = has(A) & (has(B)[:, None, :] & results(name)).any(2)
    assert torch.equal(has(found), holds)


@pytest.mark.parametrize("name", intervals.LOGIC)
def test_logic(name: str) -> None:
    a, b = (Interval(*(y[n] for y in TRUTHS)) for n in (torch.arange(9) // 3, torch.arange(9) % 3))
    found = intervals.LOGIC[name](a) if name == "not_" else intervals.LOGIC[name](a, b)
    for n in range(9):
        values = [
            bool(OPERATIONS[name].torch(*[torch.tensor(x), torch.tensor(y)][: 1 + (name != "not_")]))
            for x in {bool(a.low[n]), bool(a.high[n])}
            for y in {bool(b.low[n]), bool(b.high[n])}
        ]
        assert (found.low[n], found.high[n]) == (min(values), max(values))


def test_choice() -> None:
    for condition, x, y in itertools.product(
        zip(*(z.tolist() for z in TRUTHS), strict=True), [(1, 2), (3, 5)], [(4, 4)]
    ):
        c, a, b = (Interval(*(torch.tensor(z) for z in bounds)) for bounds in (condition, x, y))
        chosen = ([x] if condition[1] else []) + ([] if condition[0] else [y])
        found = intervals.chosen(c, a, b)
        assert (int(found.low), int(found.high)) == (min(z[0] for z in chosen), max(z[1] for z in chosen))
        conditions = [Interval(torch.tensor(z[0] > 2), torch.tensor(z[1] > 1)) for z in (x, y)]
        found = intervals.chosen(c, *conditions)
        values = [bool(v) for z, w in ((x, conditions[0]), (y, conditions[1])) if z in chosen for v in w]
        assert (bool(found.low), bool(found.high)) == (min(values), max(values))


def test_nan_is_never_certain() -> None:
    """Bounds that are NaN: a comparison may hold or not."""
    nan, one = intervals.point(torch.tensor(torch.nan)), intervals.point(torch.tensor(1.0))
    for name, fn in intervals.COMPARISONS.items():
        for a, b in ((nan, one), (one, nan)):
            assert (bool(fn(a, b).low), bool(fn(a, b).high)) == (False, True), name
