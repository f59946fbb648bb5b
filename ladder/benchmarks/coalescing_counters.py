"""Bytes that strided loads fetch from L2 and from HBM, counted: `python benchmarks/coalescing_counters.py`.

The ladder's page on coalescing reads every number of a large array once, neighbouring threads `stride` numbers apart.
Sectors of 32 bytes predict min(stride, 8) bytes fetched for one used; pieces of 64 bytes predict min(stride, 16). The
profiler `ncu` counts what L2 hands to the multiprocessors and what HBM hands to L2. Each stride is one process.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from dram_counters import CountersError, table_of

SECTOR = 32  # bytes
METRICS = {
    "requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l2_sectors": "lts__t_sectors_srcunit_tex_op_read.sum",
    "hbm_bytes": "dram__bytes_read.sum",
}


def run_once(stride: int) -> None:
    """One launch to compile and warm up, and one that is counted."""
    import torch

    from flashtile_ladder.measure import memory_patterns as page

    x = torch.ones(page.NUMBERS, device="cuda")
    page.read_columns(x, stride, page.BLOCKS, page.THREADS)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    page.read_columns(x, stride, page.BLOCKS, page.THREADS)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def counted(stride: int, ncu: str) -> dict[str, float]:
    """The four counters of the one launch."""
    command = [ncu, "--profile-from-start", "off", "--metrics", ",".join(METRICS.values()), "--csv"]
    command += ["--print-units", "base", sys.executable, __file__, "--run", str(stride)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = {row["Metric Name"]: float(row["Metric Value"].replace(",", "")) for row in table_of(done.stdout)}
    if done.returncode != 0 or set(found) != set(METRICS.values()):
        raise CountersError(
            f"`{' '.join(command)}` ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return {name: found[metric] for name, metric in METRICS.items()}


def row_of(stride: int, counters: dict[str, float], used: int) -> dict[str, Any]:
    """Sectors for each request of a warp, and bytes fetched for each byte used, from L2 and from HBM."""
    return {
        "stride": stride,
        "sectors_per_request": counters["l1_sectors"] / counters["requests"],
        "l2_ratio": SECTOR * counters["l2_sectors"] / used,
        "hbm_ratio": counters["hbm_bytes"] / used,
        "sectors_predict": min(stride, 8),
        "pieces_of_64_predict": min(stride, 16),
    } | counters


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ncu", default="ncu", help="the profiler's command")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_once(options.run)
        return 0
    from flashtile_ladder.measure import memory_patterns as page

    ncu = shutil.which(options.ncu)
    if ncu is None:
        print(f"{options.ncu} is not there: it comes with the CUDA toolkit.")
        return 2
    rows = []
    for stride in page.STRIDES:
        try:
            rows.append(row_of(stride, counted(stride, ncu), 4 * page.NUMBERS))
        except CountersError as error:
            print(f"stride {stride}: not counted: {error}")
            return 2
        print(", ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
        if options.out:  # after each stride: the next one may be stopped
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
