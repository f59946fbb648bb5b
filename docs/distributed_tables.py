"""Tables of calls over several GPUs, by `benchmarks/distributed.py` and `benchmarks/long_sequence.py`."""

from functools import partial

from cells import markdown, rows

CALLS = {"ring": "ring", "gather": "gather", "ulysses": "ulysses"}
PEERS = {"zigzag ring": "ring-flash-attention's zigzag ring", "torch": "PyTorch's `context_parallel`"}
TWO_ROUNDS = "4"  # ranks whose calls were measured twice, so that no median stands against a slow sample
FAR = 1.5  # of two samples of a call, from which on both are shown
LONG_CALLS = 2**16  # tokens from which on predictions are compared
Row = dict[str, str]


def cells_of(ranks: str) -> dict[tuple[str, str], dict[str, Row]]:
    """The rows of a number of ranks, by mask and length, and by call."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows("distributed.csv"):
        if row["ranks"] == ranks:
            found.setdefault((row["mask"], row["seqlen"]), {})[row["call"]] = row
    return found


def distributed(ranks: str) -> str:
    """A row for each mask and length: one GPU's time, and each call's time and efficiency."""
    header = ("mask", "tokens", "one GPU", "`auto`", "predicted", *CALLS.values(), *PEERS.values())
    body = []
    for (mask, seqlen), cells in cells_of(ranks).items():
        auto = cells["auto"]
        others = [time_and_efficiency(cells[x]) if x in cells else "" for x in (*CALLS, *PEERS)]
        predicted = f"{float(auto['predicted_ms']):.1f}"
        taken = f"{time_and_efficiency(auto)}, {auto['scheme']}"
        alone = ", ".join(f"{x:.1f}" for x in samples(auto, "one_"))
        body.append([mask, length(seqlen), alone, taken, predicted, *others])
    return markdown(header, body)


def samples(row: Row, of: str = "") -> list[float]:
    """The median of a call in milliseconds; of two samples that are far apart, both."""
    least, most = (float(row[f"{of}{name}_ms"]) for name in ("least", "most"))
    return [least, most] if row["ranks"] == TWO_ROUNDS and most > FAR * least else [float(row[f"{of}ms"])]


def efficiencies(row: Row) -> list[float]:
    """Those of a call's samples, by the median of one GPU, or the least of its two samples that are far apart."""
    return [samples(row, "one_")[0] / x / int(row["ranks"]) for x in samples(row)]


def time_and_efficiency(row: Row) -> str:
    times, found = ([f"{x:.{digits}f}" for x in of] for of, digits in ((samples(row), 1), (efficiencies(row), 2)))
    return f"{', '.join(times)} ({', '.join(found)})"


def length(seqlen: str) -> str:
    return f"{int(seqlen) // 1024}k"


def scaling() -> str:
    """The efficiency of `auto`, a row for each mask and number of ranks."""
    by_ranks = {ranks: cells_of(ranks) for ranks in ("2", "4")}
    lengths = [n for n in sorted({int(n) for cells in by_ranks.values() for _, n in cells}) if n >= LONG_CALLS]
    body = []
    for mask in ("causal", "full", "window", "packed"):
        for ranks, cells in by_ranks.items():
            found = [cells.get((mask, str(n)), {}).get("auto") for n in lengths]
            body.append([mask, ranks, *("" if x is None else f"{efficiencies(x)[0]:.2f}" for x in found)])
    return markdown(("mask", "GPUs", *(length(str(n)) for n in lengths)), body)


def predictions() -> str:
    """The range of predicted over measured times from 64k tokens on, by scheme and mask; of samples that are far apart
    the lesser one counts.
    """
    body = []
    for ranks in ("2", "4"):
        for scheme in CALLS:
            line = [ranks, scheme]
            for mask in ("causal", "full", "window", "packed"):
                found = [
                    float(cells[scheme]["predicted_ms"]) / samples(cells[scheme])[0]
                    for (of, seqlen), cells in cells_of(ranks).items()
                    if of == mask and int(seqlen) >= LONG_CALLS and scheme in cells
                ]
                line.append(f"{min(found):.2f} to {max(found):.2f}")
            body.append(line)
    return markdown(("GPUs", "scheme", "causal", "full", "window", "packed"), body)


def long_sequence() -> str:
    """A row for each run: the efficiency is relative to one GPU's causal call of 512k tokens by pairs."""
    body = []
    for row in rows("long-sequence.csv"):
        one = float(cells_of(row["ranks"])["causal", str(2**19)]["auto"]["one_ms"]) / 1e3
        forward, backward = (float(row[f"{x}_s"]) for x in ("forward", "backward"))
        pairs, of_one = (n * (n + 1) for n in (int(row["seqlen"]), 2**19))
        efficiency = one * pairs / of_one / (forward + backward) / int(row["ranks"])
        errors = [f"{100 * float(row[f'error_{x}']):.2f}%" for x in ("out", "dq", "dk", "dv")]
        times = [f"{x:.1f} s, {float(row[f'{name}_tflops']):.0f}" for name, x in (("forward", forward), ("backward", backward))]
        body.append([length(row["seqlen"]), row["ranks"], *times, f"{efficiency:.3f}", row["gib"], ", ".join(errors)])
    header = ("tokens", "GPUs", "forward, TFLOP/s of a GPU", "backward", "efficiency", "GiB", "out, dq, dk, dv")
    return markdown(header, body)


TABLES = {f"distributed_{ranks}": partial(distributed, ranks) for ranks in ("2", "4")} | {
    "scaling": scaling,
    "predictions": predictions,
    "long_sequence": long_sequence,
}
