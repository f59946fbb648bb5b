"""Tables, and paragraphs with figures, of docs/ladder.md and docs/ladder_measurements.md, for docs/make_tables.py.

All come from the stored runs of `flashtile-ladder` and from benchmarks/results. A sentence with a figure is made here,
so that it says what the run says.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from cells import markdown
from ladder_agreement import agreement
from ladder_cpu_tables import (
    approximate,
    factor,
    factors,
    intensity,
    largest,
    lite,
    long_cpu,
    long_cpu_words,
    notes,
    plain,
    pointwise_words,
    rounding,
    stack,
    stack_words,
    tiles,
    verdicts,
)
from ladder_gpu_tables import (
    banks,
    coalescing,
    counters,
    counters_differ,
    cuda,
    dtypes,
    dtypes_words,
    large,
    long_h200,
    memory,
    parts,
    precision,
    sanitizer,
    shared,
    taken,
)
from ladder_stored import CPP, CPP_GRAPH, FLOATS, GRAPH, machine, or_missing

from flashtile_ladder import STEPS

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import hosted

BACKWARD = {
    "step": "step",
    "forward_ms": "forward, ms",
    "backward_ms": "backward, ms",
    "kept_mib": "kept, MiB",
    "extra_mib": "backward allocates, MiB",
    "error": "largest error",
}
FEATURES = {
    "step": "step",
    "feature": "feature",
    "ms": "ms",
    "times_plain": "times plain",
    "mb_moved": "MB moved, counted",
    "kept_bytes": "bytes kept for backward",
}
WIDTHS = {
    "head_dim": "d",
    "tile": "tile",
    "mb_moved": "MB moved",
    "bytes_for_1000_flops": "bytes for 1,000 operations",
    "flash1_ms": "step 5, ms",
    "flash1_gflops": "GFLOP/s",
    "product_ms": "product, ms",
    "product_gflops": "GFLOP/s ",
}
POINTWISE = {
    "operation": "operation",
    "accesses": "accesses for a score",
    "ms": "ms",
    "gb_per_s": "GB/s",
    "percent_of_copy": "% of a copy's rate",
    "gflops": "GFLOP/s",
    "operations_for_a_byte": "operations for a byte",
}
LAYERS = {
    "model": "model",
    "n": "N",
    "projections_gflop": "projections, GFLOP",
    "attention_gflop": "attention",
    "feed_forward_gflop": "feed-forward",
    "attention_percent": "attention, %",
    "feed_forward_intensity": "operations for a byte: feed-forward",
    "standard_intensity": "standard attention",
    "layer_standard": "layer, standard",
    "layer_fused": "layer, fused",
}
BLOCKS = {
    "dtype": "dtype",
    "mask": "mask",
    "tile": "tile",
    "ms": "ms",
    "tflops": "TFLOP/s",
    "peak_percent": "% of peak",
    "error": "largest error",
}


def steps() -> str:
    """All steps: what changed, and what is still open."""
    body = [
        [str(x.number), f"[{x.name}](../src/flashtile_ladder/{x.file})", x.changed, x.still_open, x.needs]
        for x in STEPS
    ]
    return markdown(("step", "", "what changed", "what is still open, and where it is mended", "needs"), body)


CHAPTERS = {
    "1_softmax": "[what attention is](#what-attention-is), [softmax, and merging](#softmax-and-merging)",
    "2_standard": "[standard attention, and its bytes](#standard-attention-and-its-bytes)",
    "3_flash1": "[FlashAttention-1](#flashattention-1)",
    "4_flash2": "[FlashAttention-2](#flashattention-2)",
    "5_backward": "[backward](#backward)",
    "6_kernels": "[Triton](#numba-and-triton-one-kernel) and [CUDA C++](#cuda-c), without a GPU",
}


def notebooks() -> str:
    """The chapters, with links to hosted notebooks where the repository has an address."""
    url = hosted.repository()
    body = [
        [f"[{name[0]}](../examples/{name}.ipynb)", words, *([hosted.links(url, f"{name}.ipynb")] if url else [])]
        for name, words in CHAPTERS.items()
    ]
    return markdown(("notebook", "goes with", *(["open in"] if url else [])), body)


TABLES: dict[str, Callable[[], str]] = {
    "ladder_steps": steps,
    "ladder_notebooks": notebooks,
    "ladder_cpu_machine": lambda: machine("cpu"),
    "ladder_cpu_stack": lambda: stack("cpu"),
    "ladder_cpu_factors": factors,
    "ladder_cpu_stack_words": stack_words,
    "ladder_cpu_long": long_cpu,
    "ladder_cpu_long_words": long_cpu_words,
    "ladder_cpu_backward": plain("cpu", "backward", BACKWARD),
    "ladder_cpu_features": plain("cpu", "features", FEATURES),
    "ladder_cpu_lite": lambda: lite("cpu"),
    "ladder_cpu_intensity": intensity("cpu"),
    "ladder_cpu_tiles": tiles,
    "ladder_cpu_widths": plain("cpu", "widths", WIDTHS),
    "ladder_cpu_pointwise": plain("cpu", "pointwise", POINTWISE),
    "ladder_cpu_pointwise_words": pointwise_words("cpu"),
    "ladder_cpu_layers": plain("cpu", "layers", LAYERS),
    "ladder_cpu_layers_words": notes("cpu", "layers"),
    "ladder_cpu_approximate": approximate("cpu"),
    "ladder_cpu_rounding": rounding("cpu"),
    "ladder_cpu_verdicts": verdicts,
    "ladder_cpu_agreement": lambda: agreement("cpu"),
    "ladder_h200_agreement": lambda: agreement("h200"),
    "ladder_h200_machine": lambda: machine("h200"),
    "ladder_h200_stack": lambda: stack("h200"),
    "ladder_h200_long_ms": long_h200("ms"),
    "ladder_h200_long_mib": long_h200("extra_mib"),
    "ladder_h200_precision": precision,
    "ladder_h200_lite": lambda: lite("h200"),
    "ladder_h200_intensity": intensity("h200"),
    "ladder_h200_backward": plain("h200", "backward", BACKWARD),
    "ladder_h200_pointwise": plain("h200", "pointwise", POINTWISE),
    "ladder_h200_pointwise_words": pointwise_words("h200"),
    "ladder_h200_forward_1": dtypes("forward", 1),
    "ladder_h200_forward_16": dtypes("forward", 16),
    "ladder_h200_backward_1": dtypes("backward", 1),
    "ladder_h200_backward_16": dtypes("backward", 16),
    "ladder_h200_dtypes_words": dtypes_words,
    "ladder_h200_blocks": plain("h200", "blocks", BLOCKS),
    "ladder_h200_cuda": cuda,
    "ladder_h200_taken": taken,
    "ladder_h200_large": large,
    "ladder_h200_parts": parts,
    "ladder_h200_sanitizer": sanitizer,
    "ladder_h200_shared": shared,
    "ladder_h200_memory": memory,
    "ladder_h200_coalescing": coalescing,
    "ladder_h200_banks": banks,
    "ladder_h200_approximate": approximate("h200"),
    "ladder_h200_rounding": rounding("h200"),
    "ladder_h200_counters": counters,
}
TABLES = {name: or_missing(make) for name, make in TABLES.items()}
FIGURES: dict[str, Callable[[], str]] = {
    "tf32_error": largest("online_tf32"),
    "ieee_error": largest("online"),
    "counters_differ": counters_differ,
    "python_graph_factor": factor(GRAPH, FLOATS),
    "cpp_graph_factor": factor(CPP_GRAPH, CPP),
    "python_cpp_factor": factor(FLOATS, CPP),
}
