"""Tables of calls over several GPUs, by `benchmarks/distributed.py` and `benchmarks/long_sequence.py`."""

from functools import partial

from cells import markdown, paragraph, rows

CALLS = {"ring": "ring", "gather": "gather", "ulysses": "ulysses"}
PEERS = {"zigzag ring": "ring-flash-attention's zigzag ring", "torch": "PyTorch's `context_parallel`"}
TWO_ROUNDS = "4"  # ranks whose calls were measured twice, so that no median stands against a slow sample
MASKS = {"causal": "causal calls", "full": "full ones", "window": "windows of 4096 keys", "packed": "packed sequences"}
GOAL_FROM = 2**17  # tokens
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
    n = int(seqlen)
    return f"{n // 2**20}M" if n % 2**20 == 0 else f"{n // 2**10}k"


def scaling() -> str:
    """The efficiency of `auto`, a row for each mask and number of ranks."""
    by_ranks = {ranks: cells_of(ranks) for ranks in ("2", "4")}
    lengths = [n for n in sorted({int(n) for cells in by_ranks.values() for _, n in cells}) if n >= LONG_CALLS]
    body = []
    for mask in MASKS:
        for ranks, cells in by_ranks.items():
            found = [cells.get((mask, str(n)), {}).get("auto") for n in lengths]
            body.append([mask, ranks, *("" if x is None else f"{efficiencies(x)[0]:.2f}" for x in found)])
    return markdown(("mask", "GPUs", *(length(str(n)) for n in lengths)), body)


def scaling_in_words() -> str:
    """The efficiency of `auto` on four GPUs from 128k tokens on, in a sentence for the page of performance."""
    found = {
        mask: [efficiencies(x["auto"])[0] for (of, n), x in cells_of("4").items() if of == mask and int(n) >= GOAL_FROM]
        for mask in MASKS
    }
    (row,) = rows("long-sequence.csv")
    words = [f"{between(found[mask])} for {name}" for mask, name in MASKS.items()]
    return paragraph(
        f"On four H200, forward and backward by `auto` have {', '.join(words[:-1])} and {words[-1]}",
        "from 128k tokens on, as a part of four times one GPU's speed;",
        f"{length(row['seqlen'])} causal tokens have {long_efficiency(row):.3f}.",
    )


def between(values: list[float]) -> str:
    """ "0.96 to 0.98", or one number."""
    least, most = (f"{x:.2f}" for x in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def predictions() -> str:
    """The range of predicted over measured times from 64k tokens on, by scheme and mask; of samples that are far apart
    the lesser one counts.
    """
    body = []
    for ranks in ("2", "4"):
        for scheme in CALLS:
            line = [ranks, scheme]
            for mask in MASKS:
                found = [
                    float(cells[scheme]["predicted_ms"]) / samples(cells[scheme])[0]
                    for (of, seqlen), cells in cells_of(ranks).items()
                    if of == mask and int(seqlen) >= LONG_CALLS and scheme in cells
                ]
                line.append(between(found))
            body.append(line)
    return markdown(("GPUs", "scheme", "causal", "full", "window", "packed"), body)


def long_efficiency(row: Row) -> float:
    """That of a long causal call, relative to one GPU's call of 512k tokens by their pairs."""
    one = float(cells_of(row["ranks"])["causal", str(2**19)]["auto"]["one_ms"]) / 1e3
    pairs, of_one = (n * (n + 1) for n in (int(row["seqlen"]), 2**19))
    return one * pairs / of_one / (float(row["forward_s"]) + float(row["backward_s"])) / int(row["ranks"])


def long_sequence() -> str:
    """A row for each run."""
    body = []
    for row in rows("long-sequence.csv"):
        errors = [f"{100 * float(row[f'error_{x}']):.2f}%" for x in ("out", "dq", "dk", "dv")]
        passes = [f"{float(row[f'{x}_s']):.1f} s, {float(row[f'{x}_tflops']):.0f}" for x in ("forward", "backward")]
        found = f"{long_efficiency(row):.3f}"
        body.append([length(row["seqlen"]), row["ranks"], *passes, found, row["gib"], ", ".join(errors)])
    header = ("tokens", "GPUs", "forward, TFLOP/s of a GPU", "backward", "efficiency", "GiB", "out, dq, dk, dv")
    return markdown(header, body)


TABLES = {f"distributed_{ranks}": partial(distributed, ranks) for ranks in ("2", "4")} | {
    "scaling": scaling,
    "scaling_in_words": scaling_in_words,
    "predictions": predictions,
    "long_sequence": long_sequence,
}
