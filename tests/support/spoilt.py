"""flashtile with a mistake, as an entrant of a benchmark, and cells that the oracle solves whole and in parts."""

from collections.abc import Callable

import torch
from torch import Tensor

from flashtile.bench.cell import Cell
from flashtile.bench.providers import Prepared, Provider, make
from flashtile.testing.case import Case

CPU = torch.device("cpu")
SMALL = Cell(heads=2, seqlen_q=40, head_dim=16)
LARGE = Cell(heads=4, heads_kv=2, seqlen_q=600, head_dim=16)  # more pairs than the oracle is given at a time


class Spoilt(Provider):
    """flashtile with a mistake: `change` gets the name of a result and the result."""

    name = "spoilt"

    def __init__(self, change: Callable[[str, Tensor], Tensor]) -> None:
        self.change = change

    def prepare(self, case: Case, decode: bool = False) -> Prepared:
        right = make(["flashtile:tiled"])[0].prepare(case, decode)
        assert right.backward is None or case.differentiates

        def backward(dout: Tensor) -> tuple[Tensor, ...]:
            assert right.backward is not None
            names = ("dq", "dk", "dv")
            return tuple(self.change(n, x.clone()) for n, x in zip(names, right.backward(dout), strict=True))

        return Prepared(lambda: self.change("out", right.forward()), backward if right.backward else None)
