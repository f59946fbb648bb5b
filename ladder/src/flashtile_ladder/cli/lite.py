"""The table `lite` of `flashtile-ladder`: errors of a softmax that is local to its tile, and of the online softmax."""

import json
import math
import os
import subprocess
import sys

import torch

from .. import step08_triton_lite, step08_triton_online
from .._host import triton_or_not
from ..measure import rounding
from .measure import Measurement, Table, error_of, inputs

LITE_PUBLISHED = {64: 0.002, 128: 0.761, 256: 1.292, 512: 2.287, 1024: 3.491}
ONLINE_PUBLISHED = {64: 0.002, 128: 0.002, 256: 0.002, 512: 0.001, 1024: 0.001}
Errors = tuple[float, float, float]  # of lite, of online, of online in TF32


def lite(device: torch.device) -> Measurement:
    where = "on the GPU" if device.type == "cuda" else "in Triton's interpreter"
    table = Table("lite", f"Triton, lite against online: largest error of an element, d = 64, {where}")
    table.see = "Lite is wrong beyond one tile; the published errors of online are those of TF32, Triton's default."
    if not triton_or_not.INSTALLED:
        table.notes.append("Not measured: " + str(triton_or_not.unavailable(None, device)))
        return table
    yield where
    measure = lite_errors if device.type == "cuda" else interpreted_lite_errors
    try:
        errors = measure(device, tuple(LITE_PUBLISHED))
    except InterpreterError as error:
        table.notes.append(f"Not measured: {error}")
        return table
    for n, (of_lite, of_online, in_tf32) in errors.items():
        row = {"n": n, "tiles": n // step08_triton_lite.BLOCK_N, "lite": of_lite, "published_lite": LITE_PUBLISHED[n]}
        row |= {"online": of_online, "online_tf32": in_tf32, "published_online": ONLINE_PUBLISHED[n]}
        table.rows.append(row)
    if device.type != "cuda":
        table.notes.append(
            "Triton's interpreter computes in float32 whatever the precision: TF32 is emulated, by products of factors "
            "whose last 13 bits are dropped."
        )
    return table


def lite_errors(device: torch.device, lengths: tuple[int, ...]) -> dict[int, Errors]:
    """For each N the errors of lite and of online, both in IEEE float32, and of online in TF32."""
    found = {}
    for n in lengths:
        q, k, v = inputs(n, 64, device)
        of_lite, of_online = (
            error_of(step.attention(q, k, v)[0], q, k, v) for step in (step08_triton_lite, step08_triton_online)
        )
        if device.type == "cuda":
            in_tf32 = step08_triton_online.attention(q, k, v, input_precision="tf32")[0]
        else:
            out = rounding.attention_in_tf32(q.numpy(), k.numpy(), v.numpy(), 1 / math.sqrt(64))
            in_tf32 = torch.from_numpy(out)
        found[n] = of_lite, of_online, error_of(in_tf32, q, k, v)
    return found


class InterpreterError(RuntimeError):
    """Triton's interpreter failed; the message has what it wrote."""


def interpreted_lite_errors(device: torch.device, lengths: tuple[int, ...]) -> dict[int, Errors]:
    """The same in another process: the interpreter has to be switched on before Triton is imported."""
    code = "import json, torch; from flashtile_ladder.cli.lite import lite_errors; "
    code += f"print(json.dumps(lite_errors(torch.device({str(device)!r}), {lengths})))"
    interpreting = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=interpreting)
    if result.returncode != 0:
        raise InterpreterError(f"step 8 failed in Triton's interpreter:\n{result.stderr}")
    return {int(n): tuple(errors) for n, errors in json.loads(result.stdout.splitlines()[-1]).items()}
