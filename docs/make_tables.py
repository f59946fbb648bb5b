"""Fill the tables of README.md and of pages in docs and ladder/docs.

    python docs/make_tables.py

Figures come from `benchmarks/results/` and from the stored runs of the ladder, layers from
`tests/project/test_imports.py`, features from the backends' own answers. A table
stands between `<!-- table: NAME -->` and `<!-- end -->`, a figure
within a line between `<!-- figure: NAME -->` and `<!-- end -->`. A test compares the pages with what this makes, so
that nothing in them can go stale.
"""

import ast
import math
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import balance_tables
import block_tables
import compatibility_tables
import distributed_tables
import feature_tables
import front_tables
import gpu_tables
import mask_tables
import mma_tables
import model_tables
import page_tables
import score_mod_tables
from cells import markdown, rows

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "ladder" / "docs"))
import ladder_tables  # noqa: E402

TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"(<!-- figure: (\w+) -->).*?(<!-- end -->)")
HEAD_DIMS = ("64", "96", "128", "192 with values of 128", "192", "256")
PEERS = ("sdpa:cudnn", "fa3")
LOSS = 0.97  # the report's rule: slower than this is a loss
Row = dict[str, str]
Cells = dict[tuple[str, ...], dict[str, float]]


def pages() -> list[Path]:
    """Every page that has a table or a figure of these."""
    some = [
        ROOT / "README.md",
        *(x for folder in ("docs", "ladder/docs") for x in sorted((ROOT / folder).rglob("*.md"))),
    ]
    return [page for page in some if re.search("<!-- (table|figure): ", page.read_text(encoding="utf-8"))]


def filled(text: str) -> str:
    """A page with its tables and figures made anew."""
    text = TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)
    return FIGURE.sub(lambda found: f"{found[1]}{ladder_tables.FIGURES[found[2]]()}{found[3]}", text)


def geomean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


# Cells of `flashtile bench` ------------------------------------------------------------------------------------------


def head_dim(row: Row) -> str:
    return f"{row['head_dim']} with values of {row['head_dim_v']}" if row["head_dim_v"] else row["head_dim"]


def mask(row: Row) -> str:
    return "causal" if row["causal"] == "True" else "full"


def length(tokens: str) -> str:
    n = int(tokens)
    return f"{n // 1024}k" if n % 1024 == 0 else tokens


def rates(name: str, key: Callable[[Row], tuple[str, ...]], unit: str = "flops_per_second") -> Cells:
    """Rates in units of 10**12, by cell and provider."""
    cells: Cells = {}
    for row in rows(f"{name}.csv"):
        if row["status"] == "ok" and row[unit]:
            cells.setdefault(key(row), {})[row["provider"]] = float(row[unit]) / 1e12
    return cells


def by_length(row: Row) -> tuple[str, ...]:
    return head_dim(row), mask(row), length(row["seqlen_q"])


def by_cache(row: Row) -> tuple[str, ...]:
    return f"{int(row['seqlen_k']):,}", row["batch"]


def against(cells: Cells, peers: Iterable[str]) -> dict[tuple[str, ...], float]:
    """Our speed in units of the fastest peer's."""
    return {key: cell["flashtile"] / max(cell[peer] for peer in peers) for key, cell in cells.items()}


# Tables --------------------------------------------------------------------------------------------------------------


def speed() -> str:
    body = []
    found = [against(rates(f"h200-hopper-{x}", by_length), PEERS) for x in ("forward", "backward")]
    for d in (*HEAD_DIMS, "all"):
        line = [d]
        for ratios in found:
            some = [ratio for (head_dim, *_), ratio in ratios.items() if d in (head_dim, "all")]
            line.append(f"{geomean(some):.2f} ({min(some):.2f} to {max(some):.2f}, {len(some)} cells)")
        body.append(line)
    return markdown(("head dimension", "forward", "backward"), body)


def losses() -> str:
    """Losses by the report's rule, one line for each pass and head dimension."""
    groups: dict[str, list[str]] = {}
    for x in ("forward", "backward"):
        for (d, m, n), ratio in against(rates(f"h200-hopper-{x}", by_length), PEERS).items():
            if ratio < LOSS:
                groups.setdefault(f"{x}, head dimension {d}", []).append(f"{m} {n}: {ratio:.2f}")
    for (keys, batch), ratio in against(rates("h200-decode", by_cache, "bytes_per_second"), PEERS).items():
        if ratio < LOSS:
            groups.setdefault("decode, head dimension 128", []).append(f"batch {batch} {keys} keys: {ratio:.2f}")
    body = [[name, ", ".join(cells)] for name, cells in groups.items()]
    return markdown(("pass", "speed relative to the faster of cuDNN and FlashAttention-3"), body)


def h200() -> str:
    """Ours / cuDNN / FlashAttention-3, by pass and head dimension."""
    columns = [(n, m) for n in ("1k", "4k", "16k") for m in ("full", "causal")]
    body = []
    for x in ("forward", "backward"):
        cells = rates(f"h200-hopper-{x}", by_length)
        for d in HEAD_DIMS:
            shown = [" / ".join(f"{cells[d, m, n][y]:.0f}" for y in ("flashtile", *PEERS)) for n, m in columns]
            body.append([f"{x}, {d}", *shown])
    return markdown(("", *(f"{n} {m}" for n, m in columns)), body)


def decode() -> str:
    cells = rates("h200-decode", by_cache, "bytes_per_second")
    providers = ("flashtile", *PEERS, "sdpa:flash")

    def cell(*key: str) -> str:
        return " / ".join(f"{1000 * cells[key][provider]:.0f}" for provider in providers)

    lengths = dict.fromkeys(keys for keys, _ in cells)
    return markdown(("keys", "batch 1", "batch 64"), [[n, cell(n, "1"), cell(n, "64")] for n in lengths])


def feature(row: Row) -> str:
    if row["head_dim"] == "64":
        return "softcap, head dimension 64" if row["softcap"] else ""
    if row["head_dim_v"]:
        return "head dimension 192 with values of 128"
    if row["heads_kv"]:
        return "grouped heads 32/8"
    if row["window"]:
        return "window 1024 at 16k"
    named = {"softcap": "softcap", "alibi": "ALiBi", "sinks": "sinks", "mask": "bool mask", "bias": "bias"}
    on = [word for name, word in named.items() if row[name] not in ("", "False")]
    if row["lengths"]:
        return "16 packed sequences of 74 to 1974"
    return on[0] if on else "dropout 0.1" if row["dropout"] != "0.0" else "plain"


def features() -> str:
    passes = [rates(f"h200-hopper-features-{x}", lambda row: (feature(row),)) for x in ("forward", "backward")]
    backends = {
        feature(row): row["detail"].partition(":")[0]
        for row in rows("h200-hopper-features-forward.csv")
        if row["provider"] == "flashtile"
    }
    body = []
    for (name,) in passes[0]:
        if name:
            line = [name, backends[name]]
            for cells in passes:
                peer = cells[name,].get("fa3")
                line.append(f"{cells[name,]['flashtile']:.0f} / {'–' if peer is None else f'{peer:.0f}'}")
            body.append(line)
    return markdown(("head dimension 128, causal, 4k", "backend", "forward", "backward"), body)


def triton() -> str:
    """The Triton kernels against three others, at head dimensions 64 and 128."""
    names = {"sdpa:flash": "FlashAttention-2", "flex": "FlexAttention", "sdpa:cudnn": "cuDNN"}
    body = []
    for x in ("forward", "backward"):
        cells = rates(f"h200-{x}", by_length)
        for d in ("64", "128"):
            line = [f"{x}, {d}"]
            for peer in names:
                some = [ratio for key, ratio in against(cells, (peer,)).items() if key[0] == d]
                line.append(f"{geomean(some):.2f} ({min(some):.2f} to {max(some):.2f})")
            body.append(line)
    return markdown(("", *names.values()), body)


def cpu() -> str:
    cells: dict[str, dict[str, str]] = {}
    for row in rows("cpu-kernels.csv"):
        if row["provider"] == "flashtile":
            dtype = {"float32": "fp32", "bfloat16": "bf16"}[row["dtype"]]
            tokens = row["seqlen_k"] or row["seqlen_q"]
            name = f"{row['measure']}, {dtype}, head dimension {row['head_dim']}, {tokens} keys"
            cells.setdefault(name, {})[mask(row)] = f"{float(row['ratio']):.2f}"
    return markdown(
        ("", "full", "causal"), [[name, cell["full"], cell.get("causal", "")] for name, cell in cells.items()]
    )


def first_calls() -> str:
    """Medians of fresh processes, in seconds."""
    files = {"Hopper kernels": "h200-hopper-first-calls", "Triton kernels": "h200-features"}
    body = []
    for name, file in files.items():
        seconds = {
            x["measure"]: float(x["value"]) for x in rows(f"{file}.csv") if x["provider"] == "flashtile" and x["value"]
        }
        body.append([name, *(f"{seconds[f'first_call_{x}']:.2f} s" for x in ("cold", "warm"))])
    return markdown(("", "empty cache", "full cache"), body)


def layers() -> str:
    tree = ast.parse((ROOT / "tests" / "project" / "test_imports.py").read_text(encoding="utf-8"))
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(x, ast.Name) and x.id == "LAYERS" for x in node.targets)
    )
    return "\n".join(["```", *(", ".join(layer) for layer in ast.literal_eval(value)), "```"])


TABLES: dict[str, Callable[[], str]] = (
    {
        "speed": speed,
        "losses": losses,
        "h200": h200,
        "decode": decode,
        "features": features,
        "triton": triton,
        "cpu": cpu,
        "first_calls": first_calls,
        "layers": layers,
    }
    | ladder_tables.TABLES
    | compatibility_tables.TABLES
    | feature_tables.TABLES
    | gpu_tables.TABLES
    | front_tables.TABLES
    | score_mod_tables.TABLES
    | block_tables.TABLES
    | balance_tables.TABLES
    | distributed_tables.TABLES
    | mask_tables.TABLES
    | model_tables.TABLES
    | mma_tables.TABLES
    | page_tables.TABLES
)

if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
