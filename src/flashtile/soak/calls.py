"""One thread of a soak: random problems, repeated many times, with mistakes in between."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashtile

from ..dispatch.status import rounds_to_eight_bits
from ..errors import AttentionError, BackendError
from ..testing.case import CACHES, Case, MaskFunction
from ..testing.generate import random_case
from ..testing.tolerance import compare
from ..verification.examine import is_hopper
from . import graphs
from .ledger import Ledger, digest
from .mistakes import mistaken

KINDS = {"plain": 12, "checked": 2, "deterministic": 3, "batch_invariant": 2, "mistaken": 5}
KINDS_ON_A_GPU = KINDS | {"captured": 3}


@dataclass(frozen=True)
class Problems:
    """Backends and a few seeds, so that after some time all their kernels are compiled."""

    seeds: range
    backends: tuple[str, ...]
    device: torch.device

    @property
    def kinds(self) -> dict[str, int]:
        return KINDS_ON_A_GPU if self.device.type == "cuda" else KINDS


class Caller:
    """One thread of a soak."""

    def __init__(self, problems: Problems, ledger: Ledger, rng: random.Random):
        self.problems, self.ledger, self.rng = problems, ledger, rng

    def call(self) -> None:
        """One call of a random kind."""
        kind = self.rng.choices(list(self.problems.kinds), list(self.problems.kinds.values()))[0]
        self.call_of(kind, self.rng.choice(self.problems.seeds), self.rng.choice(self.problems.backends))

    def call_of(self, kind: str, seed: int, backend: str) -> None:
        """Make and count one call; the ledger gets its failure."""
        words = f"seed {seed}, backend {backend}"
        try:
            device = self.problems.device
            case = random_case(seed, device=device, on_hopper=is_hopper(device))
            wrong = getattr(self, kind)(case, backend)
        except BackendError:
            self.ledger.count("declined")
        except Exception as error:
            self.ledger.fail(kind, words, f"{type(error).__name__}: {error}")
        else:
            self.ledger.count(kind)
            if wrong is not None:
                self.ledger.fail(kind, f"{words}, {case.description}", wrong)

    # Each returns what is wrong, or None ----------------------------------------------------------------------------

    def plain(self, case: Case, backend: str) -> str | None:
        return self.compared(case, backend, case.run(backend))

    def checked(self, case: Case, backend: str) -> str | None:
        results = case.run(backend)
        worst = compare(results, case, rounds_to_eight_bits=rounds_to_eight_bits(backend))[0]
        return self.compared(case, backend, results) if worst.ok else str(worst)

    def deterministic(self, case: Case, backend: str) -> str | None:
        results = case.run(backend, deterministic=True)
        if self.ledger.changed((case.seed, backend, "deterministic"), results):
            return "results differ from those of the same deterministic call before"
        return self.compared(case, backend, results)

    def batch_invariant(self, case: Case, backend: str) -> str | None:
        results = case.run(backend, batch_invariant=True)
        rows = {name: results[name] for name in ("out", "lse")}
        if self.ledger.changed((case.seed, backend, "batch_invariant"), rows):
            return "results differ from those of the same batch-invariant call before"
        worst = compare(results, case, rounds_to_eight_bits=rounds_to_eight_bits(backend))[0]
        return None if worst.ok else str(worst)

    def compared(self, case: Case, backend: str, results: dict[str, Tensor]) -> str | None:
        """Compare forward results with the results of the same call before: they do not depend on the thread."""
        forward = {name: x for name, x in results.items() if name in ("out", "lse", *CACHES)}
        if self.ledger.changed((case.seed, backend), forward):
            return "out, lse or caches differ from those of the same call before"
        return None

    def mistaken(self, case: Case, backend: str) -> str | None:
        arguments: dict[str, Any] = case.arguments | {"backend": backend}
        if hasattr(arguments.get("score_mod"), "tensors"):
            arguments["score_mod"] = flashtile.ScoreMod(arguments["score_mod"].fn, arguments["score_mod"].tensors)
        if isinstance(mask := arguments.get("mask"), MaskFunction):
            arguments["mask"] = mask.public()
        mistake, arguments = mistaken(arguments, self.rng)
        caches = {name: arguments[name] for name in CACHES if isinstance(arguments.get(name), Tensor)}
        before = digest(caches)
        try:
            getattr(flashtile, case.function)(**arguments)
        except AttentionError:
            return None if digest(caches) == before else f"{mistake}: refused, but the caches were changed"
        except Exception as error:
            return f"{mistake}: {type(error).__name__}, should be an AttentionError: {error}"
        return f"{mistake}: not refused"

    def captured(self, case: Case, backend: str) -> str | None:
        functions = "score_mod" in case.arguments or isinstance(case.arguments.get("mask"), MaskFunction)
        return self.plain(case, backend) if functions else graphs.captured(case, backend)
