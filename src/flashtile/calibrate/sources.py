"""Digests of the sources of kernels: measured times are stale where they differ."""

import ast
import functools
import hashlib
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
KERNELS = {  # files that kernels are defined in, by backend and pass
    ("hopper", False): ("forward/forward", "combine", "float32/forward"),
    ("hopper", True): ("backward/fused", "dq/dq", "dkdv/dkdv", "preprocess", "postprocess", "add_splits"),
    ("triton", False): ("forward", "between_products"),
    ("triton", True): ("dkdv", "dq", "fused", "preprocess", "between_products"),
}


@functools.cache
def digest(backend: str, backward: bool) -> str:
    """Of all files that a pass's kernels are made from."""
    folder, files = PACKAGE / "backend" / backend / "kernels", set[Path]()
    for name in KERNELS[backend, backward]:
        collect(folder / f"{name}.py", files)
    text = b"".join(file.read_bytes() for file in sorted(files))
    return hashlib.sha256(text).hexdigest()[:16]


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
