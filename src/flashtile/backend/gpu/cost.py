"""Time of a pass: what it does in units of measured rates (`rates`), which `flashtile calibrate` fits to calls."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ...call.plan import Candidate
from ...call.problem import Problem
from .waves import Head, Tile, Work

BLOCK = 128 * 128  # pairs for which a feature's time is counted
OUTSIDE = ("launch", "merge", "sum", "products")  # how the names begin of what does not overlap with the rest
# Exponents of sums of work and of what it waits for: the larger, the more of them overlaps. Warpgroups that load all
# the time hide nearly all, a core's programs, each of which loads and then multiplies, the least.
OVERLAP = {"warpgroups": 6, "few rows": 4, "gradients": 3, "programs": 2}
NEARLY = 1.04  # times the least time
SHOWN_KEYS = 2048  # keys of a row that a mask function is expected to show, as in packed documents
L2_BYTES = 24 * 2**20  # part of the L2 cache for what is read again
HELD_BYTES = 2 * L2_BYTES  # up to which the rows of a call stay in the L2 cache from call to call


class Counts(defaultdict[str, float]):
    """Numbers by the names of their rates, 0 at first."""

    def __init__(self, **first: float):
        super().__init__(float, {name.replace("_", " "): n for name, n in first.items()})

    def times(self, factor: float) -> "Counts":
        found = Counts()
        found.update({name: factor * n for name, n in self.items()})
        return found


class Cost(NamedTuple):
    """What a pass does: `counts` of what has a rate, by its name, beside which cores wait for what has `limits`, such
    as bytes of memory; `overlap` says whose loads overlap with its work.
    """

    counts: Counts
    limits: Mapping[str, float]
    overlap: str = "programs"

    def time(self, rates: Mapping[str, float]) -> float:
        """Microseconds. Launches and sums take their time besides, while other work overlaps with what it waits for."""
        outside = inside = 0.0
        for name, n in self.counts.items():
            if name.startswith(OUTSIDE):
                outside += n * rates[name]
            else:
                inside += n * rates[name]
        waits, exponent = (n * rates[name] for name, n in self.limits.items()), OVERLAP[self.overlap]
        return outside + sum(x**exponent for x in (inside, *waits)) ** (1 / exponent)


def ranked(ways: Iterable[tuple[Any, int, Cost]], rates: Mapping[str, float]) -> list[Candidate]:
    """Candidates from tiles, splits and costs; the fastest first, or of those that are nearly as fast the one with the
    fewest splits, which take memory.
    """
    found = [Candidate(tile, splits, cost.time(rates)) for tile, splits, cost in ways]
    limit = NEARLY * min(candidate.microseconds for candidate in found)
    return sorted(
        found, key=lambda x: (x.microseconds > limit, x.num_splits * (x.microseconds <= limit), x.microseconds)
    )


def shared(head: Head, splits: int) -> Head:
    """The tiles of a head whose steps so many programs share."""
    if splits == 1:
        return head
    return Head(head.count * splits, tuple(Tile(-(-tile.steps // splits), tile.edges / splits) for tile in head.sample))


def of_group(head: Head, heads: int) -> Head:
    """The tiles of keys that so many query heads visit."""
    return Head(head.count, tuple(Tile(tile.steps * heads, tile.edges * heads) for tile in head.sample))


def shown(head: Head, problem: Problem) -> Head:
    """The tiles of a pass whose kernels visit the blocks that a mask function shows, as far as a plan may assume."""
    part = min(1.0, SHOWN_KEYS / max(problem.counts.keys, 1))
    if problem.mask_mod is None or not problem.window.unlimited or part == 1:
        return head
    return Head(head.count, tuple(Tile(part * tile.steps, tile.edges) for tile in head.sample))


def missed(bytes_at_once: float) -> float:
    """The part of loads that miss the L2 cache, if so many bytes are read again and again at the same time."""
    return max(0.0, 1 - L2_BYTES / max(bytes_at_once, 1))


def features(problem: Problem) -> list[str]:
    """Names of what changes the scores or the visibility of each pair."""
    p = problem
    found = [name for name in ("bias", "mask", "alibi_slopes") if getattr(p.features, name) is not None]
    found += [name for name in ("softcap", "dropout") if getattr(p, name)]
    return found + [name for name in ("score_mod", "mask_mod") if getattr(p, name) is not None]


def add_work(counts: Counts, kernel: str, name: str, work: Work, tile: Any, problem: Problem) -> None:
    """Add the work of a core: the tiles of a kernel, whose rates have the `name`, and what features do to each of
    their pairs, at one rate for all tiles of the `kernel`.
    """
    counts[f"{name} tile"] += work.tiles
    counts[f"{name} step"] += work.steps
    if work.edges:
        counts[f"{name} edge"] += work.edges
    for feature in features(problem):
        counts[f"{kernel} {feature}"] += work.steps * tile.block_m * tile.block_n / BLOCK


def memory(count: float, problem: Problem) -> dict[str, float]:
    """The limit of so many bytes of a call, unless its rows are still in the L2 cache."""
    return {"byte": count} if rows_bytes(problem) > HELD_BYTES else {}


def rows_bytes(problem: Problem) -> float:
    """Bytes of q, k, v and the results."""
    p, (batch, rows, keys) = problem, problem.counts
    of_row, of_key = p.dtype.itemsize, p.dtype.itemsize if p.eight_bit is None else 1
    both = p.head_dim + p.head_dim_v
    return batch * (
        p.num_heads_q * rows * of_row * both + p.num_heads_kv * keys * of_key * (both - p.latent * p.head_dim_v)
    )
