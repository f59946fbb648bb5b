"""The tables `features` and `backward` of `flashtile-ladder`: the price of masks, dropout and gradients."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import step04_standard, step05_flash1, step06_flash2, step10_variants
from ..measure.counted import count
from .allocation import live_and_peak_bytes
from .library import STEP, attention
from .measure import Measurement, Run, Table, inputs, timed

MIB = 2**20
FEATURES_LENGTH, BACKWARD_LENGTH, WIDTH = 1024, 1024, 64
DROPOUT, SLOPE, SOFTCAP, WINDOW, WORKERS = 0.1, 0.5, 30.0, (128, 0), 4


def features(device: torch.device) -> Measurement:
    """Step 5 with the paper's second algorithm, and step 10's variants; bytes are counted while they run."""
    n = FEATURES_LENGTH
    table = Table("features", f"Features: forward of one head, N = {n}, d = {WIDTH}, float32")
    table.see = (
        "Causal and windows skip tiles, so fewer bytes move; a mask of N² is read; dropout keeps a state and no mask."
    )
    q, k, v = inputs(n, WIDTH, device)
    mask = torch.ones((n, n), dtype=torch.bool, device=device).tril_()
    state = torch.Generator(device).manual_seed(0).get_state()
    flash1, variants = step05_flash1.attention, step10_variants.attention
    uneven = [x[:-1] for x in (q, k, v)]
    runs: dict[tuple[str, str], tuple[Callable[..., Any], list[Tensor], dict[str, Any], int]] = {
        ("5 FlashAttention-1", "none"): (flash1, [q, k, v], {}, 0),
        ("5 FlashAttention-1", "causal"): (flash1, [q, k, v], {"causal": True}, 0),
        ("5 FlashAttention-1", "mask"): (flash1, [q, k, v], {"mask": mask}, mask.nbytes),
        ("5 FlashAttention-1", "dropout"): (
            flash1,
            [q, k, v],
            {"dropout_p": DROPOUT, "rng_state": state},
            state.nbytes,
        ),
        ("10 compiled variants", "none"): (variants, [q, k, v], {}, 0),
        ("10 compiled variants", "causal"): (variants, [q, k, v], {"causal": True}, 0),
        ("10 compiled variants", "window"): (variants, [q, k, v], {"window": WINDOW}, 0),
        ("10 compiled variants", "softcap"): (variants, [q, k, v], {"softcap": SOFTCAP}, 0),
        ("10 compiled variants", "ALiBi"): (variants, [q, k, v], {"alibi_slope": SLOPE}, 0),
        ("10 compiled variants", "dropout"): (variants, [q, k, v], {"dropout_p": DROPOUT}, 8),  # the seed
        ("10 compiled variants", "uneven"): (variants, uneven, {}, 0),
    }
    plain: dict[str, float] = {}
    for (step, feature), (function, tensors, keywords, kept) in runs.items():
        yield f"{step}, {feature}"
        run = functools.partial(function, *tensors, **keywords)
        counts, _ = count(function, tensors, **keywords)
        row = table.add({"step": step, "feature": feature}, lambda run=run: timed(run, device))
        row["times_plain"] = row["ms"] / plain.setdefault(step, row["ms"])
        row["mb_moved"] = (counts["read"] + counts["written"]) / 1e6
        row["kept_bytes"] = kept
    table.notes.append(
        f"Kept for backward beyond q, k, v, out and lse: a mask of dropout would have {n * n:,} bytes. Window: the "
        f"last {WINDOW[0]} keys; uneven: N = {n - 1}."
    )
    return table


def backward(device: torch.device) -> Measurement:
    """Forward and backward of the steps on tensors, what lies between them, and what backward allocates."""
    n = BACKWARD_LENGTH
    table = Table("backward", f"Backward: one head, N = {n}, d = {WIDTH}, float32")
    table.see = "Recomputing P costs one product of five, and saves the N² numbers that standard attention keeps."
    q, k, v = inputs(n, WIDTH, device)
    dout = inputs(n, WIDTH, device)[0].flip(0)
    exact = exact_gradients(q, k, v, dout)
    for name, (forward, gradients, kept) in training_runs(q, k, v, dout).items():
        yield name
        row = table.add(
            {"step": name},
            lambda forward=forward, gradients=gradients: (
                timed(forward, device, prefix="forward_") | timed(gradients, device, prefix="backward_")
            ),
        )
        _, peak = live_and_peak_bytes(gradients, device)
        row |= {"kept_mib": kept / MIB, "extra_mib": peak / MIB}
        found = [x.reshape(n, WIDTH) for x in gradients()]
        row["error"] = max(float((x.double() - y).abs().max()) for x, y in zip(found, exact, strict=True))
    table.notes.append(
        "Kept: bytes between forward and backward beyond q, k, v and out. Memory of backward counts its results. "
        f"Deterministic: {WORKERS} workers with a dq each; on a GPU, ceil(multiprocessors / (batch * heads)) of them."
    )
    return table


def training_runs(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, tuple[Run, Run, int]]:
    """For each step: forward, backward from forward's results, and the bytes kept between them."""
    out, lse, p = step04_standard.attention_in_kernels(q, k, v)
    saved = (q, k, v, out, lse, dout)
    runs: dict[str, tuple[Run, Run, int]] = {
        "4 standard, P kept": (
            lambda: step04_standard.attention_in_kernels(q, k, v),
            lambda: step04_standard.backward(*saved, p=p),
            p.nbytes,
        ),
        "4 standard, P from lse": (
            lambda: step04_standard.attention(q, k, v),
            lambda: step04_standard.backward(*saved),
            lse.nbytes,
        ),
    }
    tiled = {"5 FlashAttention-1": step05_flash1, "6 FlashAttention-2": step06_flash2}
    for name, step in (tiled | {"10 compiled variants": step10_variants}).items():
        runs[name] = functools.partial(step.attention, q, k, v), functools.partial(step.backward, *saved), lse.nbytes
    ordered = functools.partial(step10_variants.backward, *saved, deterministic=True, workers=WORKERS)
    runs["10 deterministic"] = runs["10 compiled variants"][0], ordered, lse.nbytes
    q4, k4, v4 = (x[None, None].detach().requires_grad_() for x in (q, k, v))
    result = attention(q4, k4, v4)
    runs[STEP] = (
        lambda: attention(q4, k4, v4),
        lambda: torch.autograd.grad(result, (q4, k4, v4), dout[None, None], retain_graph=True),
        lse.nbytes,
    )
    return runs


def exact_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """dq, dk, dv `[N, d]` in fp64, by autograd of the definition."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    s = leaves[0] @ leaves[1].mT / math.sqrt(q.shape[-1])
    out = torch.softmax(s, dim=-1) @ leaves[2]
    return list(torch.autograd.grad(out, leaves, dout.double()))
