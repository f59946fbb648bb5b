"""Every operation of formulas against PyTorch's, of conditions, integers and reals, at zeros, infinities, NaN and ties:
what is traced has PyTorch's values, kinds and derivatives, or it is not traced.
"""

import itertools
import math
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.expression import Untraced
from flashtile.expression.formula import formula_of
from flashtile.expression.functions import FUNCTIONS
from flashtile.expression.torch_code import run

FP64 = torch.float64
VALUES: dict[torch.dtype, list[Any]] = {
    FP64: [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.3],
    torch.int64: [0, 1, -1, 2, -3],
    torch.bool: [False, True],
}
NUMBERS = [2, 0, -0.5, True]
SYMBOLS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor", "lshift", "rshift")
pytestmark = pytest.mark.usefixtures("wide_defaults")
OWN = ("and_", "or_", "xor", "not_")  # no names of PyTorch
Function = Callable[..., Any]


@pytest.fixture
def wide_defaults() -> Iterator[None]:
    """Integers become reals of float64, so that rounding does not decide comparisons."""
    torch.set_default_dtype(FP64)
    yield
    torch.set_default_dtype(torch.float32)


def kind(x: Tensor) -> torch.dtype:
    return FP64 if x.is_floating_point() else torch.bool if x.dtype is torch.bool else torch.int64


def called(name: str) -> Function:
    return next(f for x in (torch, Tensor, torch.nn.functional) if (f := getattr(x, name, None)) is not None)


def with_number(fn: Function, number: float, first: bool) -> Function:
    return (lambda x: fn(number, x)) if first else lambda x: fn(x, number)


def functions() -> dict[str, tuple[Function, int]]:
    """Functions and their numbers of arguments, by names."""
    found: dict[str, tuple[Function, int]] = {}
    for name in FUNCTIONS:
        if not name.startswith("new_") and not name.endswith("_like") and name not in OWN:
            found |= {f"{name}, {n}": (called(name), n) for n in (1, 2)}
    for name in SYMBOLS:
        fn = getattr(operator, name)
        found[f"operator {name}"] = fn, 2
        for number, first in itertools.product(NUMBERS, (True, False)):
            found[f"{name}, {number!r}, {first}"] = with_number(fn, number, first), 1
    for name in ("neg", "abs", "invert", "pos"):
        found[f"operator {name}"] = getattr(operator, name), 1
    for n in (0.5, 1.5, 2.5, 0.3, -1.5, 2, 3, -1, -2, -3, 0, 1, 2.0, -1.0, 0.0, True, math.nan):
        found[f"pow {n!r}"] = with_number(operator.pow, n, first=False), 1
    for n in (*NUMBERS, math.nan):
        found[f"clamp min {n!r}"] = (lambda x, n=n: x.clamp(min=n)), 1
        found[f"clamp max {n!r}"] = (lambda x, n=n: x.clamp(max=n)), 1
        found[f"masked_fill {n!r}"] = (lambda x, y, n=n: x.masked_fill(y, n)), 2
        found[f"where {n!r}"] = (lambda x, y, n=n: torch.where(y, x, n)), 2
    return found


def compare(fn: Function, columns: Sequence[Tensor], *, derivatives: bool = True) -> bool:
    """Compare a function of elements with its formula; whether there is one."""
    kinds = []

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any, *tensors: Any) -> Any:
        result = fn(*(x[i] for x in tensors))
        kinds.append(kind(result))
        return torch.where(result, 1.0, 0.0) if kinds[-1] is torch.bool else result + 0.0 * s

    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in columns]
    traced = formula_of(score_mod, columns)
    if isinstance(traced, Untraced):
        return False
    expected = fn(*leaves)  # or else it raises an error, and is traced
    assert kinds[-1] is kind(expected)
    count = len(columns[0])
    pairs = [torch.zeros(count, dtype=FP64), *[torch.arange(count)] * 4]
    close = {"rtol": 1e-9, "atol": 1e-12, "equal_nan": True}
    [found] = run(traced[0].program, pairs, columns)
    torch.testing.assert_close(found.broadcast_to(count), expected.double(), **close)
    if not derivatives or not expected.requires_grad:
        return True
    expected.backward(torch.ones_like(expected))
    partials = traced[0].partials([True] * len(columns))
    results = run(partials.program, pairs, columns)
    for n, x in enumerate(leaves):
        if x.requires_grad:
            total = sum((results[load.partial] for load in partials.loads if load.tensor == n), torch.zeros(count))
            gradient = torch.zeros(count) if x.grad is None else x.grad
            # A NaN has none; that of a clamped one is 1 here, there 0.
            some = ~(torch.isnan(expected) | torch.stack([torch.isnan(y.double()) for y in columns]).any(0))
            torch.testing.assert_close(total.double()[some], gradient.double()[some], **close)
    return True


def columns_of(kinds: Sequence[torch.dtype], without: Sequence[float] = ()) -> list[Tensor]:
    """All combinations of values."""
    rows = itertools.product(*([x for x in VALUES[k] if repr(x) not in map(repr, without)] for k in kinds))
    return [torch.tensor(x, dtype=k) for x, k in zip(zip(*rows, strict=True), kinds, strict=True)]


# Where a derivative is an infinity of another sign: no softmax has one that is not NaN.
ENDS: dict[str, Sequence[float]] = dict.fromkeys(("pow 1.5", "pow 2.5"), (-math.inf,))


@pytest.mark.parametrize("name", functions())
def test_operations(name: str) -> None:
    fn, count = functions()[name]
    divides = any(x in name for x in ("div", "mod", "remainder"))
    for kinds in itertools.product(VALUES, repeat=count):
        # PyTorch raises an error for integers divided by 0, where formulas have some number.
        without = ENDS.get(name, (0, False) if divides and FP64 not in kinds else ())
        compare(fn, columns_of(kinds, without))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i, c: c + c + c, lambda x, i, c: torch.add(c, True), lambda x, i, c: torch.where(c, x, i) * c,
        lambda x, i, c: torch.clamp(i, -1, 2) + x, lambda x, i, c: (x.abs() ** 1.5) * x, lambda x, i, c: c * c + i,
        lambda x, i, c: torch.minimum(x, x) + torch.maximum(c, c), lambda x, i, c: x.clamp(-1, 1) * torch.sign(i),
    ],
)  # fmt: skip
def test_mixed_operations_are_traced(fn: Function) -> None:
    assert compare(fn, columns_of((FP64, torch.int64, torch.bool), without=(math.inf, -math.inf, math.nan)))


def random_function(seed: int) -> Function:
    """A function of a real, an integer and a condition: random operations of what was computed before."""
    draw = random.Random(seed)
    known = list(functions().values())
    steps = [(draw.choice(known), draw.random(), draw.random()) for _ in range(draw.randint(2, 6))]

    def fn(*values: Any) -> Any:
        found = list(values)
        for (step, count), x, y in steps:
            found.append(step(*(found[int(z * len(found))] for z in (x, y)[:count])))
        return found[-1]

    return fn


@pytest.mark.parametrize("seeds", [range(60)], ids=str)
def test_random_mixtures(seeds: range) -> None:
    """Values alone: derivatives of sums that are infinite depend on their order. Some are traced."""
    columns = columns_of((FP64, torch.int64, torch.bool), without=(math.inf, -math.inf, math.nan))
    outcomes = []
    for seed in seeds:
        fn = random_function(seed)
        try:
            expected = fn(*columns)
        except (RuntimeError, TypeError, ValueError, ZeroDivisionError):  # also where values are out of range
            continue
        if isinstance(expected, Tensor) and expected.shape == columns[0].shape:
            outcomes.append(compare(fn, columns, derivatives=False))
    assert any(outcomes)
