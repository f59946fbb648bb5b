"""The table "which GPU do you have?" of README.md for docs/make_tables.py, from results that other tables show."""

import math
from collections import Counter
from collections.abc import Sequence

import mma_tables
import model_tables
from cells import markdown, rows

PEERS = ("sdpa:cudnn", "fa3")
HOPPER = ("h200-hopper-forward", "h200-hopper-backward")


def summary(ratios: Sequence[float]) -> str:
    """Geometric mean and range."""
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def hopper(name: str) -> str:
    """Our rate relative to the faster of cuDNN and FlashAttention-3, over the cells of a sweep."""
    cells: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows(f"{name}.csv"):
        if row["status"] == "ok" and row["flops_per_second"]:
            key = row["head_dim"], row["head_dim_v"], row["causal"], row["seqlen_q"]
            cells.setdefault(key, {})[row["provider"]] = float(row["flops_per_second"])
    return summary([cell["flashtile"] / max(cell[peer] for peer in PEERS) for cell in cells.values()])


def models() -> str:
    """The best other's time relative to ours, over the stored calls of models by the device's time."""
    return summary([x.ratio for _, x in model_tables.stored() if not x.group.endswith("eager")])


def mma(measure: str) -> str:
    """The time of PyTorch's FlashAttention-2 relative to ours, both as code of sm_80."""
    return summary(
        [x for (_, name), peers in mma_tables.ratios().items() if name == measure for x in peers["sdpa:flash"]]
    )


def cpu(measure: str) -> str:
    return summary(
        [
            float(row["ratio"])
            for row in rows("cpu-kernels.csv")
            if row["provider"] == "flashtile" and row["measure"] == measure
        ]
    )


def compiled(arch: str) -> str:
    number = Counter(row["arch"] for row in rows("offline-triton-3.9.0.csv"))[arch]
    return f"{number} kernels compiled for {arch}; none has run"


def emulated() -> str:
    found = [row for row in rows("arm.csv") if row["processor"] == "NEON"]
    problems, wrong = (sum(int(row[name]) for row in found) for name in ("problems", "wrong"))
    return f"not run; its kernels ran emulated: {problems} problems, {wrong} wrong"


def which_chip() -> str:
    """Chip, backend, state, and speed relative to the fastest other: above 1 flashtile is faster."""
    unknown = "not measured"
    x86 = ", ".join(f"{measure} {cpu(measure)}" for measure in ("forward", "backward", "decode"))
    sm_80 = ", ".join(f"{measure} {mma(measure)}" for measure in ("forward", "backward"))
    forward, backward = map(hopper, HOPPER)
    h200, h100 = f"H200: forward {forward}, backward {backward}", f"H100, calls of models: {models()}"
    body = [
        ["H100, H200", "`hopper`", "tested, measured", f"{h200}; {h100}"],
        ["A100", "`triton`", "sm_80 code ran on an H200, not on this chip", f"as sm_80 code: {sm_80}"],
        ["RTX 4090", "`triton`", "sm_89 code ran on an H200, not on this chip", unknown],
        ["B200", "`triton`", compiled("sm_100"), unknown],
        ["MI300", "`triton`", compiled("gfx942"), unknown],
        ["Mac", "`cpu`", emulated(), unknown],
        ["Windows", "`cpu`", "not run", unknown],
        ["no GPU, x86-64 Linux", "`cpu`", "tested, measured", x86],
    ]
    return markdown(("chip", "backend", "state", "speed relative to the best other"), body)


TABLES = {"which_chip": which_chip}
