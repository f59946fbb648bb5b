"""Counts, failures and digests, which the threads of a soak share."""

import hashlib
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

MOST_FAILURES = 50  # further ones would repeat the same causes


@dataclass(frozen=True)
class Failure:
    kind: str  # kind of call
    call: str
    message: str


@dataclass
class Ledger:
    """Counts, failures, and digests of results that have to come out the same each time."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    digests: dict[tuple[object, ...], bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, kind: str) -> None:
        with self.lock:
            self.counts[kind] += 1

    def fail(self, kind: str, call: str, message: str) -> None:
        with self.lock:
            self.counts["failed"] += 1
            if len(self.failures) < MOST_FAILURES:
                self.failures.append(Failure(kind, call, message))

    @property
    def hopeless(self) -> bool:
        return len(self.failures) >= MOST_FAILURES

    def changed(self, key: tuple[object, ...], results: Mapping[str, Tensor]) -> bool:
        """Whether earlier results under this key were different."""
        current = digest(results)
        with self.lock:
            return self.digests.setdefault(key, current) != current


def digest(results: Mapping[str, Tensor]) -> bytes:
    """Hash of all bits; all NaN count as one."""
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(results):
        x = results[name].detach().cpu()
        if x.is_floating_point() and x.itemsize == 1:
            x = x.float()
        x = x.nan_to_num(nan=12345.0, posinf=torch.inf, neginf=-torch.inf)
        hasher.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        hasher.update(x.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().data)
    return hasher.digest()
