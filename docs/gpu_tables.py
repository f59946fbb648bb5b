"""Tables of GPU runs: compilers of the same kernels, bias and masks."""

from cells import markdown, rows

PROVIDERS = ("flashtile", "triton", "efficient", "cudnn")


def compilers() -> str:
    """A row for each call: microseconds by Triton 3.6, and the speeds of the other versions' kernels."""
    return sides_of("h200-compilers.csv", {"triton-371": "3.7.1", "triton-38": "3.8.0", "triton-39": "3.9.0"})


def warpgroups() -> str:
    """As `compilers`, with two and with three warpgroups in forward."""
    names = {"triton-38": "3.8, two", "triton-38-three": "3.8, three"}
    return sides_of("h200-compilers-warpgroups.csv", names | {"triton-39": "3.9, two", "triton-39-three": "3.9, three"})


def sides_of(file: str, sides: dict[str, str]) -> str:
    """A row for each call of `compare_sources.py`: microseconds of the first side, and the speeds of `sides`."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows(file):
        found.setdefault(row["cell"], {})[row["side"].split()[-1]] = row
    body = [
        [cell, f"{float(x['triton-36']['us']):.0f}", *(f"{float(x[side]['speed']):.2f}" for side in sides)]
        for cell, x in found.items()
    ]
    return markdown(("call", "3.6.0, us", *sides.values()), body)


def bias_and_masks() -> str:
    """A row for each call: forward and backward in milliseconds."""
    body = []
    for row in rows("h200-bias-and-masks.csv"):
        cells = [", ".join(row[f"{name} {x}"] for x in ("forward", "backward")) for name in PROVIDERS]
        body.append([row["call"], *("fails" if x == ", " else x for x in cells)])
    header = ("call", "flashtile", "Triton's kernels alone", "efficient", "cuDNN")
    return markdown(header, body)


TABLES = {
    "compilers": compilers,
    "warpgroups": warpgroups,
    "bias_and_masks": bias_and_masks,
}
