"""Schemes of sharded calls by a rule of bytes, against the model of time: `python benchmarks/scheme_rule.py`.

For each weight of the rule and each kind of links, the time by `simulate` of the scheme that the rule takes, divided by
that of the scheme that "auto" takes: the mean, the largest, and the part of calls above 1.03.
"""

import itertools
import statistics
from typing import NamedTuple

from flashtile.distributed import Rates, simulate
from flashtile.distributed.simulate import accepted_schemes, preferred

LINKS = {"NVLink": (3.1e11, 2e-5), "45 GB/s": (4.5e10, 3e-5), "10 GB/s": (1e10, 5e-5)}
RANKS = 2, 4, 8, 16, 32
LENGTHS = 2**14, 2**16, 2**18, 2**20
HEADS = (32, 8), (32, 32), (16, 1), (64, 8)
MASKS = {"causal": {}, "full": {"causal": False}, "window": {"window": (4095, 0)}}
WEIGHTS = 0.5, 1, 2, 4  # of a byte for heads, which no computation overlaps


class Sharded(NamedTuple):
    """A call over ranks."""

    ranks: int
    seqlen: int
    heads: int
    kv_heads: int
    mask: str
    layout: str


def by_rule(call: Sharded, weight: float) -> str:
    """The scheme with the fewest bytes, unless another is balanced alone."""
    ranks, seqlen, heads, kv_heads, mask, layout = call
    if heads % ranks:
        return "gather"
    if mask == "causal" and layout == "contiguous":
        return "ulysses"  # whose ranks have all rows
    own = seqlen // ranks
    pieces = 2 if layout == "zigzag" else 1
    gathered = pieces * min(4095, seqlen - own) if mask == "window" else seqlen - own
    for_keys = 2 * kv_heads * gathered
    for_heads = 2 * (heads + max(kv_heads, ranks)) * own * (ranks - 1) // ranks
    return "ulysses" if weight * for_heads < for_keys else "gather"


def main() -> None:
    calls = [Sharded(n, s, *h, mask, x) for n, s, h, mask, x in itertools.product(
        RANKS, LENGTHS, HEADS, MASKS, ("zigzag", "contiguous"))]  # fmt: skip
    for name, (link, latency) in LINKS.items():
        rates = Rates(6.3e14, (link,), latency, 6.1e14, 2.8e12)
        times, best = [], []
        for call in calls:
            found = [
                simulate(
                    scheme, (call.ranks,), rates=rates, seqlen=call.seqlen, heads=call.heads, kv_heads=call.kv_heads,
                    layout=call.layout, **MASKS[call.mask],
                )
                for scheme in accepted_schemes((call.ranks,), call.heads)
            ]  # fmt: skip
            times.append({x.scheme: x.seconds_forward + x.seconds_backward for x in found})
            best.append(preferred(found).scheme)
        for weight in WEIGHTS:
            ratios = [t[by_rule(call, weight)] / t[b] for call, t, b in zip(calls, times, best, strict=True)]
            above = sum(x > 1.03 for x in ratios) / len(ratios)
            worst = calls[max(range(len(calls)), key=lambda n: ratios[n])]
            print(f"{name}, weight {weight}: mean {statistics.mean(ratios):.3f}, most {max(ratios):.2f} of {worst}, "
                  f"{above:.0%} above 1.03")  # fmt: skip


if __name__ == "__main__":
    main()
