"""Whether the tables of one stored run agree on the calls that they share: a table of an older kernel does not.

A call is a step, a dtype, a number of heads and N; its rate is operations of the two products for each second. Tables
have different N, so a rate is compared with those of other N in the other table.
"""

from typing import NamedTuple

from cells import figure, paragraph
from ladder_stored import STANDARD, THREE, MissingError, Row, command, rows

FACTOR = 1.6  # between rates at neighboring N, and between clocks: the device's alone, and with the call from Python
SLOW_ENOUGH = 0.3  # ms: below, the call from Python is a large part of the time
WIDTH = 64


class Rate(NamedTuple):
    """The rate of one call, in one table."""

    table: str
    step: str
    dtype: str
    heads: int
    n: int
    tflops: float

    @property
    def call(self) -> tuple[str, str, int]:
        return self.step, self.dtype, self.heads


def rates(file: str) -> list[Rate]:
    """Forward passes without a mask, d = 64, of the tables that have them."""
    found = []
    for row in rows_of(file, "dtypes"):
        if (row["mask"], row["pass"]) == ("full", "forward") and row["ms"] > SLOW_ENOUGH:
            found.append(Rate("dtypes", row["step"], row["dtype"], row["heads"], row["n"], row["tflops"]))
    for name, heads in (("long", 1), ("cuda", 16)):
        for row in rows_of(file, name):
            step, _, dtype = row["step"].rpartition(", ")
            step, dtype = (step, dtype) if dtype in ("float16", "float32", "TF32") else (row["step"], "float32")
            if step == STANDARD:  # with lse; `dtypes` has the three kernels alone
                continue
            step = STANDARD if step == THREE else step
            if row["ms"] > SLOW_ENOUGH:
                found.append(Rate(name, step, dtype, heads, row["n"], 4e-9 * heads * row["n"] ** 2 * WIDTH / row["ms"]))
    return found


def rows_of(file: str, name: str) -> list[Row]:
    try:
        return rows(file, name)
    except MissingError:
        return []


def disagreements(file: str) -> list[tuple[Rate, Rate]]:
    """Pairs of rates of one call in two tables that differ by more than `FACTOR`, at the same N or beyond it.

    A rate grows with N until the device is full, so another table's rate at a smaller N may only be lower, and at a
    larger N only higher.
    """
    found = rates(file)
    pairs = []
    for i, a in enumerate(found):
        for b in found[i + 1 :]:
            if a.call != b.call or a.table == b.table:
                continue
            small, large = sorted((a, b), key=lambda rate: rate.n)
            too_fast = small.tflops > FACTOR * large.tflops
            if too_fast or (small.n == large.n and large.tflops > FACTOR * small.tflops):
                pairs.append((a, b))
    return pairs


def agreement(file: str) -> str:
    """A sentence for each call on which two tables disagree, with the command that measures it again."""
    pairs = disagreements(file)
    if not pairs:
        return "The tables below agree on the calls that they share."
    lines = [
        "*Measure again.* Two tables of this page disagree on a call, because its kernel has changed between them:"
    ]
    lines.append("")
    for a, b in {(x.call, x.table, y.table): (x, y) for x, y in pairs}.values():
        heads = f"{a.heads} head{'s' if a.heads > 1 else ''}"
        rates_of = " and ".join(f"{figure(x.tflops)} TFLOP/s in `{x.table}` at N = {x.n}" for x in (a, b))
        lines.append(paragraph(f"{a.step}, {a.dtype}, {heads}: {rates_of}.", bullet="- "))
    tables = sorted({rate.table for pair in pairs for rate in pair})
    how = command(file, tables[0]).replace(tables[0], " --table ".join(tables), 1)
    return "\n".join([*lines, "", f"The command is `{how}`."])
