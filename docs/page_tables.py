"""The table of paged calls that docs/make_tables.py fills, from `benchmarks/results/h200-pages.csv`."""

from cells import figure, markdown, rows

Times = dict[tuple[str, str], float]  # milliseconds by page size, "" without pages, and library


def calls() -> dict[tuple[str, ...], Times]:
    """The times of each shape: batch, rows, keys and head dimension."""
    found: dict[tuple[str, ...], Times] = {}
    for row in rows("h200-pages.csv"):
        shape = tuple(row[name] for name in ("batch", "seqlen_q", "seqlen_k", "head_dim"))
        found.setdefault(shape, {})[row["page_size"], row["library"]] = float(row["ms"])
    return found


def paged_calls() -> str:
    """Milliseconds without pages, and the speed over pages relative to that; of FlashAttention-3 in brackets."""
    sizes = sorted({size for times in calls().values() for size, _ in times if size}, key=int)
    body = []
    for (batch, seqlen_q, seqlen_k, head_dim), times in calls().items():
        own, other = times["", "flashtile"], times["", "fa3"]
        cells = [f"{batch} x {seqlen_q}:{seqlen_k} x {head_dim}", f"{figure(own)} ({figure(other)})"]
        for size in sizes:
            paged = times.get((size, "flashtile"))
            cells.append("" if paged is None else f"{own / paged:.2f} ({own / times[size, 'fa3']:.2f})")
        body.append(cells)
    return markdown(("call", "no pages, ms", *(f"{size} rows" for size in sizes)), body)


TABLES = {"paged_calls": paged_calls}
