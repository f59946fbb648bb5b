"""The oracle: float64 results with their error bounds' ingredients, written from docs/contract.md alone.

`solve(case)` is all that the rest needs. `solution` turns every kind of call into sequences, `forward` and
`backward` are one sequence's formulas, `sums` what a result and its bound add up to, `modification` the user's
score function, `philox` dropout. Nothing of flashtile outside `testing` is imported: one mistake must not be in
a backend and here.
"""

from .solution import Expected, solve

__all__ = ["Expected", "solve"]
