"""The table `approximate` of `flashtile-ladder`: linear attention and hashed buckets, error and time against length."""

import functools
from typing import Any

import torch
from torch import Tensor

from ..related import linear_attention, lsh_attention
from .library import NAME, one_head
from .measure import Measurement, Run, Table, inputs, timed

WIDTH = 64
LINEAR_LENGTHS, FEATURES, FEATURES_LENGTH = (512, 2048, 8192), (64, 256, 1024), 2048
HASHED_LENGTHS, ROUNDS, CHUNK = (1024, 4096), (1, 2, 4), 64
SECONDS = 0.1  # for each time
CHECKED_ROWS = 256


def approximate(device: torch.device) -> Measurement:
    """Each against attention over all pairs; errors in units of the exact result's norm."""
    table = Table("approximate", f"Approximate alternatives: one head, d = {WIDTH}, float32")
    table.see = (
        "Time falls below that of all pairs only for long sequences, and the error is far from that of rounding."
    )
    for n in LINEAR_LENGTHS:
        yield f"linear, N = {n}"
        q, k, v = inputs(n, WIDTH, device)
        table.add(
            {"method": "linear, elu + 1", "n": n, "parameter": None},
            functools.partial(compared, lambda q=q, k=k, v=v: linear_attention.attention(q, k, v), q, k, v, device),
        )
    q, k, v = inputs(FEATURES_LENGTH, WIDTH, device)
    q, k = q / 2, k / 2
    for count in FEATURES:
        yield f"{count} features"
        features = linear_attention.random_features(WIDTH, count)
        run = functools.partial(linear_attention.attention, q, k, v, features=features)
        table.add(
            {"method": "linear, random features", "n": FEATURES_LENGTH, "parameter": count},
            functools.partial(compared, run, q, k, v, device),
        )
    for n in HASHED_LENGTHS:
        q, v = clustered(n, device)
        yield f"all pairs, N = {n}"
        all_pairs = timed(functools.partial(lsh_attention.exact, q, v), device, SECONDS, prefix="all_pairs_")
        for rounds in ROUNDS:
            yield f"buckets, N = {n}, {rounds} rounds"
            table.add(
                {"method": "hashed buckets, rounds", "n": n, "parameter": rounds},
                functools.partial(hashed, rounds, q, v, all_pairs, device),
            )
    table.notes.append(
        f"All pairs: {NAME}; for buckets, whose queries are their keys, a softmax over all other rows in "
        "three operations. Random features: q and k half as large. Buckets: rows in clusters of 64 directions."
    )
    return table


def clustered(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Shared queries and keys, and values, the same for each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        q, v = lsh_attention.clustered(n, WIDTH), torch.randn(n, WIDTH)
    return q.to(device), v.to(device)


def compared(run: Run, q: Tensor, k: Tensor, v: Tensor, device: torch.device) -> dict[str, Any]:
    """Times of a form of linear attention and of all pairs, and its error in the last rows."""
    exact = torch.softmax(q[-CHECKED_ROWS:].double() @ k.double().mT / WIDTH**0.5, dim=1) @ v.double()  # [R, d]
    row = timed(run, device, SECONDS) | timed(lambda: one_head(q, k, v), device, SECONDS, prefix="all_pairs_")
    return row | {"relative_error": relative_error(run()[-CHECKED_ROWS:], exact), "pairs_percent": None}


def hashed(rounds: int, q: Tensor, v: Tensor, all_pairs: dict[str, float], device: torch.device) -> dict[str, Any]:
    """The same of buckets, with the share of pairs that their chunks have at most."""
    run = functools.partial(lsh_attention.attention, q, v, buckets=len(q) // CHUNK, rounds=rounds, chunk=CHUNK)
    exact, _ = lsh_attention.exact(q.double(), v.double())
    row = timed(run, device, SECONDS) | all_pairs | {"relative_error": relative_error(run()[0], exact)}
    return row | {"pairs_percent": 100 * min(rounds * 2 * CHUNK / len(q), 1.0)}


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
