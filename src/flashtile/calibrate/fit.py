"""Rates that explain measured times: microseconds of each count of a cost, none negative."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..backend.gpu.cost import OUTSIDE, OVERLAP, Cost
from ..backend.gpu.rates import ESTIMATED, KERNEL, products

ROUNDS, ALIKE = 14, 4  # rounds of deciding what bounds a call, and rounds in which all errors count alike
# Rates of limits at first: what nothing waits for has no least squares. They stay within a factor of BOUND, and bytes
# are no faster than memory.
START, BOUND = {"byte": 3e-7, "hopper request": 1.2e-3}, 2.0
RIDGE, EXCHANGES = 1e-7, 200  # constants of the least squares
PRIOR, PRODUCT = 0.01, 5e-7  # weight of what is expected, and microseconds of a product of most kernels
OUTLIER = 0.2  # part of the time, from which an error counts less


class Fit(NamedTuple):
    rates: dict[str, float]
    errors: np.ndarray  # error of each call, in parts of its time


def fit(costs: Sequence[Cost], microseconds: Sequence[float], bandwidth: float = 0.0) -> Fit:
    """The rates with the least squares of relative errors, on a chip with a known bandwidth, in bytes in a microsecond,
    or 0.
    """
    least = {name: first / BOUND for name, first in START.items()} | ({"byte": 1 / bandwidth} if bandwidth else {})
    names = sorted({name for cost in costs for name in (*cost.counts, *cost.limits)})
    column = {name: n for n, name in enumerate(names)}
    times = np.array(microseconds)
    outside, inside = (np.zeros((len(costs), len(names))) for _ in range(2))
    limits = {name: np.zeros(len(costs)) for name in sorted({name for cost in costs for name in cost.limits})}
    for row, cost in enumerate(costs):
        for name, n in cost.counts.items():
            (outside if name.startswith(OUTSIDE) else inside)[row, column[name]] += n
        for name, n in cost.limits.items():
            limits[name][row] = n
    prior = expected(names)
    rates, errors = np.array([START.get(name, 0.0) for name in names]), np.zeros(len(costs))
    shares, weights = {name: np.zeros(len(costs)) for name in limits}, np.ones(len(costs))
    share, overlap = np.ones(len(costs)), np.array([float(OVERLAP[cost.overlap]) for cost in costs])
    for n in range(ROUNDS):
        matrix = outside + inside * share[:, None]
        for name, amounts in limits.items():
            matrix[:, column[name]] += amounts * shares[name]
        matrix = np.vstack((matrix * (weights / times)[:, None], prior))
        rates = least_squares(matrix, np.concatenate((weights, np.zeros(len(prior)))))
        for name, first in START.items():
            if name in column:
                rates[column[name]] = max(min(rates[column[name]], first * BOUND), least[name])
        work = inside @ rates
        waits = {name: amounts * rates[column[name]] for name, amounts in limits.items()}
        total = (work**overlap + sum(x**overlap for x in waits.values())) ** (1 / overlap) + 1e-9
        # A sum of powers is homogeneous: the sum of its parts times their derivatives.
        share = (work / total) ** (overlap - 1)
        shares = {name: (x / total) ** (overlap - 1) for name, x in waits.items()}
        errors = (outside @ rates + total) / times - 1
        if n >= ALIKE:
            weights = 1 / np.sqrt(1 + (errors / OUTLIER) ** 2)
    return Fit({name: float(rates[n]) for name, n in column.items()}, errors)


def expected(names: Sequence[str]) -> np.ndarray:
    """Rows that are 0 where a kernel's tile and its steps at an edge take as long as other kernels', by its products:
    what few calls tell of a kernel stays plausible.
    """
    column = {name: n for n, name in enumerate(names)}
    rows = []
    for name in names:
        kernel, _, part = name.rpartition(" ")
        found = KERNEL.fullmatch(kernel)
        if found is None or part not in ("tile", "edge") or f"{kernel} step" not in column:
            continue
        row = np.zeros(len(names))
        row[column[name]], row[column[f"{kernel} step"]] = 1.0, -ESTIMATED[part]
        rows.append(row * PRIOR / (products(found) * PRODUCT))
    return np.array(rows).reshape(-1, len(names))


def least_squares(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The vector without negative numbers whose product with a matrix is nearest to what is wanted: numbers that would
    be negative are left out, and come back where they would shorten the distance (Lawson, Hanson, "Solving Least
    Squares Problems", chapter 23, several at a time).
    """
    gram, right = matrix.T @ matrix, matrix.T @ wanted
    gram[np.diag_indices_from(gram)] += RIDGE * np.maximum(np.diag(gram), 1e-30)
    free, x = np.ones(len(right), bool), np.zeros(len(right))
    for _ in range(EXCHANGES):
        x[:] = 0
        x[free] = np.linalg.solve(gram[np.ix_(free, free)], right[free])
        negative = x < 0
        if negative.any():
            free &= ~negative
            continue
        back = ~free & (right - gram @ x > 1e-9 * np.abs(right).max())
        if not back.any():
            break
        free[np.argmax(np.where(back, right - gram @ x, -np.inf))] = True
    return np.maximum(x, 0)
