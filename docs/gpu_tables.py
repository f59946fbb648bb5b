"""Tables of GPU runs: compilers of the same kernels, bias and masks, derivatives, caches, a whole model."""

import json
from typing import NamedTuple

from cells import RESULTS, markdown, rows

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


def forward_mode() -> str:
    """A row for each call: milliseconds of `torch.func.jvp` and its speed."""
    body = [
        [
            row["cell"],
            f"{float(row['jvp ms']):.3g}",
            row["times forward"],
            row["times faster than dense"],
            row["TFLOP/s"],
        ]
        for row in rows("h200-forward-mode.csv")
    ]
    return markdown(("call", "ms", "times forward's time", "times dense's speed", "TFLOP/s"), body)


def eight_bits() -> str:
    """Time of decoding over caches of 8 bits divided by its time over bfloat16, by shape; a plain read first."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows("h200-eight-bit-caches.csv"):
        found.setdefault((row["batch"], row["seqlen_k"], row["head_dim"]), {})[row["cache"]] = row["ratio"]
    names = [name for name in next(iter(found.values())) if name != "bfloat16"]
    body = [[*shape, *(f"{float(of[name]):.2f}" for name in names)] for shape, of in found.items()]
    return markdown(("batch", "keys", "head dimension", *names), body)


class Part(NamedTuple):
    """A part of `benchmarks/llama.py`: tokens/s, and what else was measured, by attention function."""

    part: str
    speeds: dict[str, float]
    peaks: dict[str, float]
    errors: dict[str, float]


def llama_rows() -> list[Part]:
    found = []
    for part, results in json.loads((RESULTS / "h200-llama.json").read_text()).items():
        ran = {name: x for name, x in results.items() if "failure" not in x}
        batch = int(next(word for word in part.split() if word.isdigit()))
        speeds = {name: x.get("tokens_per_s") or 1e3 * batch / x["ms_per_token"] for name, x in ran.items()}
        peaks = {name: x["peak_mib"] for name, x in ran.items() if "peak_mib" in x}
        found.append(Part(part, speeds, peaks, {name: x["error"] for name, x in ran.items()}))
    return found


def llama() -> str:
    """Tokens/s of a Llama of 1B parameters, MiB of a training step, and the error against float32."""
    names = ("sdpa", "tile_attention", "fa3")
    body = []
    for row in llama_rows():
        cells = [
            [f"{x[name]:{form}}" if name in x else "" for name in names]
            for x, form in zip(row[1:], (",.0f", ".0f", ".3f"), strict=True)
        ]
        body.append([row.part, *(" / ".join(x for x in some if x) for some in cells)])
    return markdown(("", "tokens/s", "MiB", "error"), body)


TABLES = {
    "llama": llama,
    "forward_mode": forward_mode,
    "eight_bits": eight_bits,
    "compilers": compilers,
    "warpgroups": warpgroups,
    "bias_and_masks": bias_and_masks,
}
