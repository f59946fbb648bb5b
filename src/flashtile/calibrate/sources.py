"""Digests of the sources of kernels: measured times are stale where they differ."""

import ast
import functools
import hashlib
from pathlib import Path

from ..backend.gpu.chips import MMA_SYNC

PACKAGE = Path(__file__).parents[1]
FOLDERS = {"mma": "triton"}
WIDE = "wide "  # passes of heads of more than 256 features, where a kind has kernels of their own
KERNELS: dict[tuple[str, str], tuple[str, ...]] = {  # files that kernels are defined in, by kind and pass
    ("hopper", "forward"): ("forward/forward", "combine", "float32/forward"),
    ("hopper", "backward"): ("backward/fused", "dq/dq", "dkdv/dkdv", "preprocess", "postprocess", "add_splits"),
    ("hopper", "tangents"): ("forward/forward", "combine", "tangents/tangents"),
    ("triton", "forward"): ("forward", "between_products"),
    ("triton", "backward"): ("dkdv", "dq", "fused", "preprocess", "between_products"),
    ("triton", "tangents"): ("tangents",),
    ("cpu", "forward"): ("forward", "decode", "tile_forward"),
    ("cpu", "backward"): ("backward",),
    ("mma", "forward"): ("mma/forward",),
    ("mma", "wide forward"): ("mma/wide_forward",),
    ("mma", "backward"): ("mma/backward", "mma/from_sums"),
    ("mma", "tangents"): ("mma/tangents",),
}


@functools.cache
def digest(kind: str, of_pass: str) -> str:
    """Of all files that a pass's kernels are made from."""
    folder, files = PACKAGE / "backend" / FOLDERS.get(kind, kind) / "kernels", set[Path]()
    for name in KERNELS.get((kind, of_pass), KERNELS[kind, of_pass.removeprefix(WIDE)]):
        collect(folder / f"{name}.py", files)
    text = b"".join(file.read_bytes() for file in sorted(files))
    return hashlib.sha256(text).hexdigest()[:16]


def kinds(arch: str) -> tuple[str, ...]:
    """The kinds of kernels that are candidates on a chip."""
    return ("triton", "mma") if arch in MMA_SYNC else ("hopper", "triton")


def collect(file: Path, found: set[Path]) -> None:
    """Add a file of kernels and those that it imports."""
    if file in found:
        return
    found.add(file)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for path in (base.with_suffix(".py"), *(base / f"{name.name}.py" for name in node.names)):
                if path.is_file() and "kernels" in path.parts:
                    collect(path, found)
