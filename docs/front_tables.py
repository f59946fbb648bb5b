"""Losses and the table of chips in README.md for docs/make_tables.py, from results that other tables show."""

from collections import Counter
from collections.abc import Sequence
from statistics import geometric_mean

import mma_tables
import model_tables
from cells import markdown, paragraph, rows
from gpu_tables import llama_rows

PEERS = ("sdpa:cudnn", "fa3")
HOPPER = ("h200-hopper-forward", "h200-hopper-backward")


def summary(ratios: Sequence[float]) -> str:
    """Geometric mean and range."""
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def hopper(name: str) -> dict[tuple[str, ...], float]:
    """Our rate relative to the faster of cuDNN and FlashAttention-3, for the cells of a sweep."""
    cells: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows(f"{name}.csv"):
        if row["status"] == "ok" and row["flops_per_second"]:
            key = row["head_dim"], row["head_dim_v"], row["causal"], row["seqlen_q"]
            cells.setdefault(key, {})[row["provider"]] = float(row["flops_per_second"])
    return {key: cell["flashtile"] / max(cell[peer] for peer in PEERS) for key, cell in cells.items()}


def models(*, eager: bool) -> list[float]:
    """The best other's time relative to ours, over the stored calls of models: eager, or by the device's time."""
    return [x.ratio for _, x in model_tables.stored() if x.group.endswith("eager") == eager]


def mma(measure: str) -> list[float]:
    """The time of PyTorch's FlashAttention-2 relative to ours, both as code of sm_80."""
    kinds = {kind: peers["sdpa:flash"] for kind, peers in mma_tables.ratios().items()}
    return [x for (_, name), some in kinds.items() if name == measure for x in some]


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


def llama_decoding() -> float:
    """Tokens/s of decoding without a graph, where Python takes most of the time, relative to `sdpa`."""
    (row,) = (row for row in llama_rows() if row.part.startswith("decode, "))
    return row.speeds["tile_attention"] / row.speeds["sdpa"]


def front_losses() -> str:
    """Where others are faster, which stands above the speeds."""
    eager, backward, sm_80 = models(eager=True), hopper(HOPPER[1]), mma("backward")
    worst = {width: min(x for (d, *_), x in backward.items() if d == width) for width in ("96", "192")}
    down = " and ".join(dict.fromkeys(f"{x:.2f}" for x in worst.values()))
    parts = (
        f"eager calls below 0.1 ms, mostly with gradients (down to {min(eager):.2f} of the best other's speed, H100)",
        f"backward at head dimensions 96 and 192 (down to {down}, H200)",
        f"a Llama's decoding outside of a CUDA graph ({llama_decoding():.2f} of sdpa's speed, H200)",
        f"sm_80 code, backward (mean {geometric_mean(sm_80):.2f}, down to {min(sm_80):.2f})",
        "and the first call, which compiles.",
    )
    return paragraph(
        f"**Where it loses**: {'; '.join(parts)}",
        "[All losses](docs/performance.md#where-flashtile-loses), [the losses in models](docs/models.md#slower).",
    )


def which_chip() -> str:
    """Chip, backend, state, and speed relative to the fastest other: above 1 flashtile is faster."""
    unknown = "not measured"
    x86 = ", ".join(f"{measure} {cpu(measure)}" for measure in ("forward", "backward", "decode"))
    sm_80 = ", ".join(f"{measure} {summary(mma(measure))}" for measure in ("forward", "backward"))
    forward, backward = (summary([*hopper(name).values()]) for name in HOPPER)
    h200, h100 = (
        f"H200: forward {forward}, backward {backward}",
        f"H100, calls of models: {summary(models(eager=False))}",
    )
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


TABLES = {"front_losses": front_losses, "which_chip": which_chip}
