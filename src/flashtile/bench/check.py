"""Correctness check of a provider before it is timed: the fp64 oracle and the contract's bound.

Small problems are compared element by element. Of large ones `parts` are compared, and all other elements have to be
finite. Memory that the library may get for its result is filled with NaN first, so that unwritten elements show.
"""

from dataclasses import dataclass, replace
from math import isqrt

import torch
from torch import Tensor

from ..testing.case import Case
from ..testing.oracle import Expected, solve
from ..testing.threads import one_thread
from ..testing.tolerance import Deviation, worst
from .parts import SOLVED_PAIRS, cotangent, cut, pairs, parts, pick
from .providers import Prepared, Provider

SPOILT_BUFFERS = 4
SHORTENED = 256  # most rows and keys of a problem with dropout that is too large to solve
GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Verdict:
    """Result of a check: `ratio` is the worst error in units of its bound, `what` says which elements were compared."""

    ok: bool
    ratio: float
    what: str
    reason: str = ""


class Checker:
    """The expected results of one case, solved once for all providers."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.solved: dict[str, tuple[Case, dict[str, Expected]]] = {}

    def verdict(self, provider: Provider, prepared: Prepared, decode: bool) -> Verdict:
        """Check this case; without dropout if the provider draws other random numbers."""
        if not self.case.arguments.get("dropout_p"):
            return self.compared(self.case, prepared)
        if not provider.contract_dropout:
            plain = without_dropout(self.case)
            return self.noted(self.compared(plain, provider.prepare(plain, decode)), "without dropout")
        if pairs(self.case) <= SOLVED_PAIRS:
            return self.compared(self.case, prepared)
        short = shortened(self.case)
        rows = short.arguments["q"].shape[2]
        return self.noted(self.compared(short, provider.prepare(short, decode)), f"of {rows} rows and keys")

    def noted(self, verdict: Verdict, words: str) -> Verdict:
        return replace(verdict, what=f"{verdict.what}, {words}")

    def compared(self, case: Case, prepared: Prepared) -> Verdict:
        complete = pairs(case) <= SOLVED_PAIRS
        spoil_memory(case)
        out = prepared.forward()
        if not complete and not bool(out.isfinite().all()):
            return Verdict(False, float("inf"), "every element", "out is not finite everywhere")
        if complete:
            results = {"out": out} | gradients(prepared, case, case.dout)
            return judge(self.worst_of(case.description, case, results), "every element")
        deviations: list[Deviation] = []
        for part in parts(case):
            small, results = cut(case, part), {"out": pick(case, part, "out", out)}
            for name, x in gradients(prepared, case, cotangent(case, part) if case.differentiates else None).items():
                if not bool(x.isfinite().all()):
                    return Verdict(False, float("inf"), "every element", f"{name} is not finite everywhere")
                results[name] = pick(case, part, name[1:], x)
            deviations += self.worst_of(f"{case.description}: {part}", small, results)
        return judge(deviations, " and ".join(map(str, parts(case))))

    def worst_of(self, key: str, case: Case, results: dict[str, Tensor]) -> list[Deviation]:
        """The worst element of each result; `key` names the problem among those already solved."""
        if key not in self.solved:
            with one_thread():
                self.solved[key] = case, solve(case)
        expected = self.solved[key][1]
        return [worst(x, expected[name], case.dtype, name) for name, x in results.items()]


def gradients(prepared: Prepared, case: Case, dout: Tensor | None) -> dict[str, Tensor]:
    if not case.differentiates or dout is None or prepared.backward is None:
        return {}
    spoil_memory(case)
    return dict(zip(GRADIENTS, prepared.backward(dout), strict=True))


def judge(deviations: list[Deviation], what: str) -> Verdict:
    wrong = max(deviations, key=lambda deviation: deviation.ratio)
    return Verdict(wrong.ok, wrong.ratio, what, "" if wrong.ok else str(wrong))


def spoil_memory(case: Case) -> None:
    """Fill memory of the sizes of results with NaN and free it: the allocator reuses it for the results."""
    q, k, v = (case.arguments[name] for name in ("q", "k", "v"))
    shapes = [(*q.shape[:-1], v.shape[-1])] + ([q.shape, k.shape, v.shape] if case.differentiates else [])
    for shape in shapes:
        buffers = [torch.full(shape, torch.nan, dtype=q.dtype, device=q.device) for _ in range(SPOILT_BUFFERS)]
        del buffers


def without_dropout(case: Case) -> Case:
    arguments = {name: x for name, x in case.arguments.items() if not name.startswith("dropout")}
    return replace(case, arguments=arguments, description=case.description + " without dropout")


def shortened(case: Case) -> Case:
    """The first sequence's first rows and keys, as many as the oracle solves at a time, as a call of its own."""
    if case.function != "attention":
        raise ValueError("dropout over packed sequences is checked only where they are short")
    arguments = dict(case.arguments)
    size = min(SHORTENED, isqrt(SOLVED_PAIRS // arguments["q"].shape[1]))
    rows = {name: x[:1, :, :size] for name, x in arguments.items() if name in ("q", "k", "v")}
    for name in ("bias", "mask"):
        if arguments.get(name) is not None:
            cuts = (slice(0, 1), slice(None), slice(0, size), slice(0, size))
            rows[name] = arguments[name][cuts]
    dout = None if case.dout is None else case.dout[:1, :, :size]
    return replace(case, arguments=arguments | rows, dout=dout, description=case.description + " shortened")
