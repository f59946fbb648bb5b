"""What limits the last kernels of steps 8 and 9: `python benchmarks/step_parts.py --out FILE`, on a Hopper GPU.

Each kernel is timed as it is, and then with one of its parts taken out, on the call of the table `large`, full. The
results are wrong then and the time is the finding: what a part is worth is what goes with it. Parts that hide behind
one another do not add up, and a kernel without a part may still wait for the same thing.
"""

import argparse
import functools
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flashtile_ladder import step08_triton_backward, step08_triton_lse, step09_hopper
from flashtile_ladder._host.cuda_steps import STEPS
from flashtile_ladder.cli import large
from flashtile_ladder.cli.clock import Clock
from flashtile_ladder.cli.dtypes import device_seconds, rates

Change = tuple[tuple[str, str], ...]  # texts of a file that occur once, and what takes their place
STAGES: dict[str, Change] = {
    "exponentials": (("exp2f(s[j][e] - m_new)", "(s[j][e] - m_new)"),),
    "maximum": (("m_new = fmaxf(m_new, s[j][e]);", ";"),),
    "copies of K and V": (("if (start + BLOCK_N < end) {", "if (start + BLOCK_N < end && n < 0) {"),),
    "products of P V": (
        ("                multiply_add(acc[2 * c], p, v_part[0], v_part[1]);\n", ""),
        ("                multiply_add(acc[2 * c + 1], p, v_part[2], v_part[3]);\n", ""),
    ),
}
HOPPER: dict[str, Change] = {
    "exponentials": (("p_new = gl.exp2(s * scale_log2 - gl.expand_dims(m_new, 1))", "p_new = s * scale_log2"),),
    "maximum": (("m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)", "m_new = m"),),
    "copies of K and V": tuple(
        (
            f"        hopper.mbarrier.expect({x}_full.index(stage), {x}_desc.block_type.nbytes)\n"
            f"        tma_load({x}_desc, [head, key, 0], {x}_full.index(stage), {x}.index(stage))\n",
            f"        hopper.mbarrier.arrive({x}_full.index(stage), count=1)\n",
        )
        for x in "kv"
    ),
}
BACKWARD: dict[str, Change] = {
    "exponentials": (
        ("p_t = tl.exp2(s_t * (scale * 1.4426950408889634) - lse[None, :])", "p_t = s_t - lse[None, :]"),
        ("p = tl.exp2(s * (scale * 1.4426950408889634) - lse[:, None])", "p = s - lse[:, None]"),
    ),
    "dQ, of its own kernel": (("dq_kernel[(triton.cdiv(n, dq_rows), heads)]", "(lambda *_, **__: None)"),),
    "second products of S and dP": (
        ("s = tl.dot(q, tl.trans(k), input_precision=PRECISION)", "s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)"),
        ("dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)", "dp = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)"),
    ),
}


def changed(text: str, change: Change) -> str:
    """The text with each replacement made.

    Raises:
        ValueError: a text does not occur once.
    """
    for old, new in change:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} occurs {text.count(old)} times, not once")
        text = text.replace(old, new)
    return text


def module(step: ModuleType, change: Change, folder: Path) -> Any:
    """A step of Python with a change; from a file, which Triton reads."""
    text = changed(Path(str(step.__file__)).read_text(encoding="utf-8"), change)
    name = f"{step.__name__.rpartition('.')[2]}_{len(list(folder.iterdir()))}"
    path = folder / f"{name}.py"
    text = text.replace("from ._host", "from flashtile_ladder._host").replace("from . ", "from flashtile_ladder ")
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def stages(change: Change) -> Any:
    """Step 9's kernel with two stages of loads, and a change."""
    step = STEPS["step09_cuda_stages"]
    path = Path(step09_hopper.__file__).with_name(step.file)
    text = path.read_text(encoding="utf-8")
    return replace(step, replaced=(text, changed(text, change))) if change else step


def calls(folder: Path, device: torch.device) -> dict[tuple[str, str], Callable[[], Any]]:
    """By step and the part that is taken out; "" for none."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, large.HEADS, large.LENGTH, large.WIDTH)
    q, k, v, dout = (torch.randn(shape, generator=generator, device=device).half() for _ in range(4))
    found: dict[tuple[str, str], Callable[[], Any]] = {}
    for part, change in ({"": ()} | STAGES).items():
        found["9 CUDA C++, two stages", part] = functools.partial(stages(change).attention, q, k, v)
    for part, change in ({"": ()} | HOPPER).items():
        found["9 Gluon, Hopper", part] = functools.partial(module(step09_hopper, change, folder).attention, q, k, v)
    out, lse = step08_triton_lse.attention(q, k, v)
    for part, change in ({"": ()} | BACKWARD).items():
        step = module(step08_triton_backward, change, folder)
        found[large.BACKWARD, part] = functools.partial(step.backward, q, k, v, out, lse, dout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the findings")
    parser.add_argument("--compile", action="store_true", help="launch each kernel once, and measure nothing")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU that PyTorch can use.")
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    clock, peak, rows = Clock(device), rates(device)["float16"].flops_per_second, []
    with tempfile.TemporaryDirectory() as folder:
        for (step, part), run in calls(Path(folder), device).items():
            if options.compile:
                run()
                continue
            seconds = min(device_seconds(run, clock))
            flops = (10 if step == large.BACKWARD else 4) * large.HEADS * large.LENGTH**2 * large.WIDTH
            row: dict[str, Any] = {"step": step, "without": part, "ms": seconds * 1e3}
            row["peak_percent"] = None if part else 100 * flops / seconds / peak
            row["of_whole"] = seconds * 1e3 / next(x["ms"] for x in [*rows, row] if x["step"] == step)
            rows.append(row)
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            if options.out:
                about = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
                options.out.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
