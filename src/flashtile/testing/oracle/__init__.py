"""The oracle: float64 results with their error bounds' ingredients, written from docs/contract.md alone.

`solve(case)` is its interface. `solution` turns every kind of call into sequences, `forward` and `backward` are one
sequence's formulas, `sums` the sums behind a result and its bound, `modification` the user's score function, `philox`
dropout. Nothing of flashtile outside `testing` is imported, so that one mistake cannot be in a backend and here.
"""

from .solution import Expected, solve

__all__ = ["Expected", "solve"]
