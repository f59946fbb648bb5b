"""CUDA graphs: captured once, replayed on other values, compared with a call that was not captured."""

import threading

import torch
from torch import Tensor

import flashtile

from ..testing.case import CACHES, Case

REPLAYS = 3
_capture = threading.Lock()  # PyTorch captures one graph at a time


def captured(case: Case, backend: str) -> str | None:
    """Capture a call and replay it; return the difference from a plain call, or None."""
    static = {name: x.clone() if isinstance(x, Tensor) else x for name, x in case.arguments.items()}
    stream = torch.cuda.current_stream(case.arguments["q"].device)
    # PyTorch requires a run on the stream first, which compiles and sets up: neither can be captured.
    results(case, static, backend)
    graph = torch.cuda.CUDAGraph()
    with _capture:
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            static_results = results(case, static, backend)
    for replay in range(REPLAYS):
        static["q"].neg_()
        for name in CACHES:
            if name in static:
                static[name].copy_(case.arguments[name])
        graph.replay()
        replayed = {name: x.clone() for name, x in static_results.items()}
        expected = results(case, static, backend)  # a KV cache gets the same tokens in the same places
        for name, x in expected.items():
            if not ((x == replayed[name]) | (x.isnan() & replayed[name].isnan())).all():
                return f"replay {replay} of a graph: {name} differs from that of a call outside"
    return None


def results(case: Case, arguments: dict, backend: str) -> dict[str, Tensor]:
    """`out` and `lse`, and gradients of q, k and v where the case has some."""
    leaves = [
        arguments[name].detach().requires_grad_(case.differentiates) for name in ("q", "k", "v") if name in arguments
    ]
    inputs = arguments | dict(zip(("q", "k", "v"), leaves, strict=False))
    function = getattr(flashtile, case.function)
    out, lse = function(**inputs, return_lse=True, backend=backend, deterministic=True)
    if not case.differentiates:
        return {"out": out, "lse": lse}
    pairs = [(x, dx) for x, dx in ((out, case.dout), (lse, case.dlse)) if dx is not None]
    outputs, cotangents = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(outputs, leaves, cotangents)
    named = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return {"out": out.detach(), "lse": lse.detach()} | named
