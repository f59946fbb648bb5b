"""The judge: a learner's function on small inputs, against the definition in float64 and the bytes of the step.

A mistake is named if the learner's results on all probes are those of a known wrong version, within rounding.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..measure.counted import count
from . import Exercise, variants

# Of results, relative and absolute; and absolute for each unit of the largest k, squared.
TOLERANCES = {torch.float64: (1e-9, 1e-14), torch.float32: (1e-4, 2e-6)}
LOG2_E = 1.4426950408889634
MARGIN = 8  # rows of NaN behind each tensor of a kernel, for what is read or written there
Results = dict[str, Tensor] | str  # by name, or the error that was raised


class Probe(NamedTuple):
    """One input, from the smallest to the largest."""

    name: str
    n: int
    d: int
    causal: bool = False
    scale: float | None = None
    slope: float = 0.0  # by how much a key's score exceeds that of the key before
    mask: bool = False


PROBES = (
    Probe("one key", 1, 1),
    Probe("two keys, the larger score last", 2, 1, slope=2.0),
    Probe("two keys, the larger score first", 2, 1, slope=-2.0),
    Probe("a scale of its own", 3, 2, scale=0.3),
    Probe("causal", 4, 2, causal=True),
    Probe("scores of thousands", 5, 2, slope=900.0),
    Probe("scores of minus thousands", 5, 2, slope=-900.0),
    Probe("an odd size", 7, 3, slope=0.5),
    Probe("an odd size, causal", 7, 3, causal=True, slope=0.5),
    Probe("a mask that hides a whole row", 5, 3, mask=True),
)


def of_tiles(rows: int, keys: int, d: int) -> list[Probe]:
    """Inputs for a kernel with tiles of so many rows and keys, and one head dimension."""
    most = max(rows, keys)
    return [
        Probe("one tile of keys", keys, d),
        Probe("two tiles of keys, the larger scores last", 2 * keys, d, slope=2 / keys),
        Probe("two tiles of keys, the larger scores first", 2 * keys, d, slope=-2 / keys),
        Probe("a scale of its own", 2 * keys, d, scale=0.3),
        Probe("scores of thousands", 2 * keys, d, slope=1800 / keys),
        Probe("causal", 2 * most, d, causal=True),
        Probe("scores of minus thousands", 2 * keys, d, slope=-1800 / keys),
        Probe("a key more than a tile", keys + 1, d),
        Probe("an odd size", 2 * most + 1, d, slope=2 / most),
        Probe("an odd size, causal", most + keys + 1, d, causal=True, slope=2 / most),
    ]


class Verdict(NamedTuple):
    right: bool
    text: str
    mistake: str = ""


def tensors(probe: Probe) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout `[n, d]`, float64."""
    generator = torch.Generator().manual_seed(7)
    q, k, v, dout = (torch.randn(probe.n, probe.d, generator=generator, dtype=torch.float64) for _ in range(4))
    return q.abs() + 0.5, k + probe.slope * torch.arange(probe.n)[:, None], v, dout


def visible(probe: Probe) -> Tensor:
    """bool `[n, n]`: where a row sees a key. The mask hides all keys from row 2."""
    seen = torch.ones(probe.n, probe.n, dtype=torch.bool)
    if probe.mask:
        seen = torch.rand(probe.n, probe.n, generator=torch.Generator().manual_seed(1)) < 0.6
        seen[2] = False
    return seen.tril() if probe.causal else seen


@functools.cache
def oracle(probe: Probe) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The definition in float64: out and lse; then dq, dk, dv by PyTorch's derivative."""
    q, k, v, dout = tensors(probe)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    seen = visible(probe)
    some = seen.any(dim=1, keepdim=True)  # [n, 1]
    scale = 1 / math.sqrt(probe.d) if probe.scale is None else probe.scale
    s = (scale * (q @ k.mT)).masked_fill(~seen & some, -math.inf)  # [n, n]
    out = (torch.softmax(s, dim=1) * some) @ v
    lse = torch.logsumexp(s, dim=1).masked_fill(~some[:, 0], -math.inf)
    gradients = torch.autograd.grad(out, inputs, dout)
    return {"out": out.detach(), "lse": lse.detach()}, dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def expected(exercise: Exercise, probe: Probe) -> dict[str, Tensor]:
    if exercise.form in ("variant", "order"):
        return variants.defined(probe.name) if exercise.form == "variant" else variants.wanted()
    if exercise.form == "predict":
        step = exercise.step()
        return {name: torch.tensor(float(step.holds(name, probe.n))) for name in step.CASES}
    if exercise.form == "softmax":
        return {"softmax": torch.softmax(tensors(probe)[1][:, 0], dim=0)}
    forward, gradients = oracle(probe)
    if exercise.form == "triton" and exercise.function == "dkdv_kernel":
        return {name: gradients[name] for name in ("dk", "dv")}
    if exercise.form == "triton" and not exercise.causal:
        return {"out": forward["out"]}
    return gradients if exercise.form == "backward" else forward


def call(exercise: Exercise, function: Callable[..., Any], probe: Probe) -> dict[str, Tensor]:
    """Results by name, and the bytes that moved where the step counts them."""
    if exercise.form in ("variant", "order"):
        return variants.chosen(function, probe.name) if exercise.form == "variant" else variants.ordered(function)
    if exercise.form == "predict":
        return {name: torch.tensor(float(probe.n in lengths)) for name, lengths in function().items()}
    q, k, v, dout = (x.to(dtype_of(exercise)) for x in tensors(probe))
    if exercise.form == "softmax":
        return {"softmax": torch.as_tensor(function(k[:, 0]), dtype=torch.float64)}
    scale = 1 / math.sqrt(probe.d) if probe.scale is None else probe.scale
    if exercise.form == "gluon":
        from .._host import gluon_emulation

        names = {exercise.function: function}
        return dict(zip(("out", "lse"), gluon_emulation.attention(names, q, k, v, probe.causal, scale), strict=True))
    if exercise.form == "tiled":
        function.__globals__.update(exercise.keywords)
        out, lse = torch.full_like(q, math.nan), q.new_full((probe.n,), math.nan)
        function(*(x.numpy() for x in (q, k.mT.contiguous(), v)), scale, probe.causal, out.numpy(), lse.numpy())
        return {"out": out, "lse": lse}
    if exercise.form == "triton":
        return launched(exercise, function, probe, scale)
    keywords: dict[str, Any] = {"mask": visible(probe)} if probe.mask else {}
    if exercise.language == ".py":
        keywords |= exercise.keywords
    arguments, names = [q, k, v], ("out", "lse")
    if exercise.form == "backward":
        arguments, names = [q, k, v, *(x.to(q.dtype) for x in oracle(probe)[0].values()), dout], ("dq", "dk", "dv")
    if exercise.counted:
        counts, results = count(function, arguments, probe.causal, probe.scale, **keywords)
        moved = {"bytes": torch.tensor([counts["read"], counts["written"]], dtype=torch.float64)}
        return dict(zip(names, results, strict=True)) | moved
    given = [x.tolist() for x in arguments] if exercise.lists else arguments
    results = function(*given, probe.causal, probe.scale, **keywords)
    return {name: torch.as_tensor(x, dtype=torch.float64) for name, x in zip(names, results, strict=True)}


def launched(exercise: Exercise, kernel: Any, probe: Probe, scale: float) -> dict[str, Tensor]:
    """Results of a Triton kernel in the interpreter. Behind each tensor lie rows of NaN."""
    rows, keys = exercise.tile
    n, d = probe.n, probe.d
    q, k, v, dout, out, dk, dv = (torch.full((n + MARGIN, d), math.nan) for _ in range(7))
    for room, x in zip((q, k, v, dout), tensors(probe), strict=True):
        room[:n] = x
    lse, delta = torch.full((n + MARGIN,), math.nan), torch.full((n + MARGIN,), math.nan)
    values: dict[str, Any] = {"Q": q, "K": k, "V": v, "O": out, "LSE": lse, "N": n, "D": d, "PRECISION": "ieee"}
    values |= {"DO": dout, "DELTA": delta, "DK": dk, "DV": dv}
    values |= {"scale": scale, "scale_log2": scale * LOG2_E, "BLOCK_M": rows, "BLOCK_N": keys}
    values |= {"CAUSAL": probe.causal, "EVEN": n % keys == 0}
    backward = exercise.function == "dkdv_kernel"
    if backward:
        right = oracle(probe)[0]
        lse[:n], delta[:n] = right["lse"], (right["out"] * dout[:n]).sum(dim=1)
    grid = math.ceil(n / (keys if backward else rows)), 1
    kernel[grid](**{name: values[name] for name in inspect.signature(kernel.fn).parameters})
    if backward:
        if not (dk[n:].isnan().all() and dv[n:].isnan().all()):
            raise IndexError("keys from N on are written")
        return {"dk": dk[:n], "dv": dv[:n]}
    if not (out[n:].isnan().all() and lse[n:].isnan().all()):
        raise IndexError("rows from N on are written")
    return {"out": out[:n]} | ({"lse": lse[:n]} if exercise.causal else {})


def dtype_of(exercise: Exercise) -> torch.dtype:
    return torch.float32 if exercise.single else torch.float64


def probes(exercise: Exercise) -> list[Probe]:
    if exercise.form == "predict":
        return [Probe("a prediction", n, 16) for n in exercise.step().SIZES]
    if exercise.form == "order":
        return [Probe("seven blocks of keys, three workers", variants.LENGTH, variants.D)]
    if exercise.form == "variant":
        return [Probe(name, n, variants.D) for name, (n, _) in variants.FEATURES.items()]
    if exercise.tile[0]:
        chosen = of_tiles(*exercise.tile, exercise.d)
        return [x for x in chosen if exercise.causal or (not x.causal and x.n % exercise.tile[0] == 0)]
    chosen = [x._replace(d=exercise.d or x.d) for x in PROBES if exercise.masks or not x.mask]
    if exercise.form == "softmax":
        chosen = [probe for probe in chosen if not probe.causal and probe.scale is None]
    return chosen


def attempt(exercise: Exercise, function: Callable[..., Any], probe: Probe) -> Results:
    try:
        with np.errstate(all="ignore"):  # NaN is reported as a result
            return call(exercise, function, probe)
    except Exception as error:  # the learner's: it is shown
        return f"{type(error).__name__}: {error}"


def same(a: Results, b: Results, probe: Probe, dtype: torch.dtype) -> bool:
    """Equal within rounding; NaN equals NaN, and errors are equal if their types are."""
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) and isinstance(b, str) and a.partition(":")[0] == b.partition(":")[0]
    if {name: x.shape for name, x in a.items()} != {name: x.shape for name, x in b.items()}:
        return False
    return all(bool(close(x, b[name], probe, dtype).all()) for name, x in a.items())


def close(a: Tensor, b: Tensor, probe: Probe, dtype: torch.dtype) -> Tensor:
    """bool, of the tensors' shape. A score's rounding grows with k, and a derivative multiplies it by k again."""
    largest, (relative, rounding) = float(tensors(probe)[1].abs().max()), TOLERANCES[dtype]
    absolute = relative + rounding * largest**2
    return torch.isclose(a.double(), b.double(), rtol=relative, atol=absolute, equal_nan=True)


def judge(exercise: Exercise, function: Callable[..., Any]) -> Verdict:
    """Right or wrong; if wrong, the first probe that fails and the mistake whose results these are."""
    chosen = probes(exercise)
    found = [attempt(exercise, function, probe) for probe in chosen]
    if all(isinstance(x, str) and x.startswith("NotImplementedError") for x in found):
        return Verdict(False, "Nothing is written yet: `raise NotImplementedError` is still there.")
    wrong = first_failure(exercise, found)
    if not wrong:
        return Verdict(True, f"Right on all {len(found)} probes.")
    for mistake in exercise.mistakes:
        known = exercise.compiled(exercise.with_mistake(mistake))
        pairs = zip(found, chosen, strict=True)  # a mistake runs until it differs, as a rule on the first probes
        if all(same(x, attempt(exercise, known, probe), probe, dtype_of(exercise)) for x, probe in pairs):
            return Verdict(False, f"{wrong}\nThis looks like a well-known mistake: {mistake.name}.", mistake.name)
    return Verdict(False, f"{wrong}\nThe results are those of no mistake that is known here.")


def first_failure(exercise: Exercise, found: list[Results]) -> str:
    """A sentence on the smallest probe that fails, or nothing. Bytes are compared with those of the step."""
    solution = exercise.compiled(exercise.source()) if exercise.counted else None
    for probe, got in zip(probes(exercise), found, strict=True):
        about = f"Wrong on {probe.name!r}, N = {probe.n}, d = {probe.d}"
        if isinstance(got, str):
            return f"{about}: {got}"
        wanted = dict(expected(exercise, probe))
        if solution is not None:
            wanted["bytes"] = call(exercise, solution, probe)["bytes"]
        for name, right in wanted.items():
            if name not in got:
                return f"{about}: there is no {name!r} among the results"
            x = got[name]
            if x.shape != right.shape:
                return f"{about}: {name} is {list(x.shape)}, not {list(right.shape)}"
            bad = ~close(x, right, probe, dtype_of(exercise))
            if not bad.any():
                continue
            if name == "bytes":
                return (
                    f"{about}: bytes read and written are {x.int().tolist()}, those of the step {right.int().tolist()}"
                )
            if exercise.form == "predict":
                return f"{exercise.step().sentence(name, probe.n, bool(right))}: not as predicted"
            at = bad.nonzero()[0].tolist()
            return f"{about}: {name}{at or ''} is {float(x[tuple(at)]):.6g}, not {float(right[tuple(at)]):.6g}"
    return ""
