"""The plan of a call in words: what will run, how much work it is, what limits it, and why nothing else was chosen."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..backend.gpu.origin import kernel_origin
from ..backend.gpu.rates import rates_of
from ..call.advice import refuse
from ..call.call import DIFFERENTIABLE, FEATURES, Call, Needs
from ..call.device import Device, describe_device, host_readable
from ..call.features import DENSE, VARLEN
from ..call.plan import Candidate, Plan
from ..call.problem import Problem
from ..call.window import visible_pairs
from ..call.words import in_words
from ..dispatch.launches import launches_of, tangent_tiles_of, tiles_of, unsplit
from ..dispatch.planner import SUPPORT, candidates, plan
from ..errors import BackendError
from .latent import with_query_of_values
from .mask_blocks import in_words as blocks_in_words
from .mask_blocks import mask_blocks
from .normalize import normalize
from .settings import values_of

ON_GPU = ("hopper", "triton")
BEST = 5  # candidates
QKV = Needs(True, True, True)
CACHED = ", less where its tensors lie in a cache"


@dataclass(frozen=True)
class Explanation:
    """The plan of a call, its work and its limit. `str(explanation)` is the text for people, `as_dict()` is for JSON.

    Attributes:
        problem: the call in words.
        device: its name.
        backend: the backend of the forward pass.
        tile: the shape of its tiles, in words, with backward's if that is in the same backend.
        unsplit: why forward does not split keys into as many parts as `num_splits` asks for; `None` if it does.
        why_not: backends that are preferred as a rule, and the reason each was not taken.
        candidates: on a GPU or a CPU, the five ways to run forward that are expected to take the least time, and these
            times in microseconds, as in a CUDA graph, or of one thread.
        rates: the file of measured rates that these times are counted with, and how it was scaled.
        backward: the backend of the backward pass, or "none".
        backward_tile: the shape of its tiles.
        backward_rest: names of the inputs whose gradients another backend computes, and that backend.
        tangents: the backend of a forward pass in forward mode, along tangents of q, k and v; "none" with
            `batch_invariant`.
        tangents_why_not: as `why_not`, for forward mode.
        tangents_tile: the shape of its tiles.
        tangents_candidates: as `candidates`, for forward mode.
        second: as `tangents`, of the second derivative by q, k and v.
        second_why_not: as `why_not`, for the second derivative.
        kernels: where the GPU kernels of forward and backward come from: an archive, or Triton at their first use.
        visible_pairs: pairs of a query row and a key, over sequences and query heads; at most, where the host cannot
            know.
        mask_blocks: how many blocks of 128 x 128 pairs mask and window hide, show in part and in full, over sequences
            and query heads; `None` for packed calls, without either, with chunks, and for a function that cannot be
            traced.
        flops_forward: operations, `2 * pairs * (D + Dv)`.
        flops_backward: operations of five products instead of two: 2.5 times forward where Dv is D.
        bytes_forward: each input read and each output written once.
        intensity: operations for each byte, forward.
        flops_per_second: the most that arithmetic reaches on this device in this dtype, measured (`rates`).
        bytes_per_second: the most that memory reaches.
        limit: "compute" or "memory".
        seconds_at_limit: what forward takes at these rates, the least that it can if its tensors lie in memory.
    """

    problem: str
    device: str
    backend: str
    tile: str
    unsplit: str | None
    why_not: dict[str, str]
    candidates: dict[str, float]
    rates: str
    backward: str
    backward_tile: str
    backward_rest: dict[str, str]
    tangents: str
    tangents_why_not: dict[str, str]
    tangents_tile: str
    tangents_candidates: dict[str, float]
    second: str
    second_why_not: dict[str, str]
    kernels: str
    visible_pairs: int
    mask_blocks: dict[str, int] | None
    flops_forward: int
    flops_backward: int
    bytes_forward: int
    intensity: float
    flops_per_second: float
    bytes_per_second: float
    limit: str
    seconds_at_limit: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        why_not = "".join(f"\n  not {name}: {reason}" for name, reason in self.why_not.items())
        backward = f"backward: backend {self.backward}, {self.backward_tile}\n" if self.backward != self.backend else ""
        if self.tangents not in (self.backend, "none") or self.tangents_candidates:
            backward += f"forward mode: backend {self.tangents}, {self.tangents_tile}"
            backward += "".join(f"\n  not {name}: {reason}" for name, reason in self.tangents_why_not.items())
            backward += "".join(f"\n  {time:.4g} us: {way}" for way, time in self.tangents_candidates.items()) + "\n"
        if self.second not in (self.backend, "none"):
            backward += f"second derivative: backend {self.second}"
            backward += "".join(f"\n  not {name}: {reason}" for name, reason in self.second_why_not.items()) + "\n"
        backward += "".join(f"gradient of {name}: backend {backend}\n" for name, backend in self.backward_rest.items())
        blocks = "" if self.mask_blocks is None else f"{blocks_in_words(self.mask_blocks)}\n"
        kernels = f"kernels: {self.kernels}\n" if self.kernels else ""
        unsplit = f"num_splits is not used: {self.unsplit}\n" if self.unsplit else ""
        ways = "".join(f"\n  {time:.4g} us: {way}" for way, time in self.candidates.items())
        ways = f"expected times, by {self.rates}:{ways}\n" if self.rates else ""
        return (
            f"{self.problem}\n"
            f"on {self.device}: backend {self.backend}, {self.tile}{why_not}\n"
            f"{ways}"
            f"{unsplit}"
            f"{backward}"
            f"{kernels}"
            f"forward {self.flops_forward / 1e9:.3g} GFLOP, backward {self.flops_backward / 1e9:.3g} GFLOP, "
            f"{self.visible_pairs:,} visible pairs\n"
            f"{blocks}"
            f"forward moves at least {self.bytes_forward / 1e6:.3g} MB: {self.intensity:.3g} FLOP per byte\n"
            f"limited by {self.limit}: arithmetic reaches {self.flops_per_second / 1e9:.3g} GFLOP/s here and memory "
            f"{self.bytes_per_second / 1e9:.3g} GB/s; at these rates forward takes at least "
            f"{self.seconds_at_limit * 1e3:.3g} ms{CACHED if self.limit == 'memory' else ''}"
        )


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **keywords: Any,
) -> Explanation:
    """Plan a call of `attention` (or, with `cu_seqlens_q`, of `attention_varlen`) and describe it; run none of it.

    Measures arithmetic and memory of the device for a fifth of a second, once in a process, to say which of the two
    limits the call (Williams et al., "Roofline", 2009).

    Example:
        >>> q, k, v = (torch.randn(1, 8, 256, 64) for _ in range(3))
        >>> explanation = flashtile.explain(q, k, v, causal=True)
        >>> explanation.backend, explanation.visible_pairs
        ('cpu', 263168)

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, keywords: as the call itself takes them, in shapes and dtypes too.

    Returns:
        An `Explanation`.

    Raises:
        AttentionError: as the call itself would.
    """
    from ..backend.rates import machine
    from ..iomodel import backward_flops, forward_flops, least_bytes, roofline  # not at `import flashtile`

    call = described_call(q, k, v, cu_seqlens_q, cu_seqlens_k, keywords)
    problem = Problem.describe(call)
    chosen = plan(problem, q.device, call.settings.backend)
    needs = needs_of(call)
    differentiable = problem.eight_bit is None
    backward = backward_plan(problem, q.device, call.settings.backend, needs) if differentiable else None
    tile, backward_tile = tiles_in_words(call, chosen, backward, needs)
    along, second = (
        None
        if problem.batch_invariant or not differentiable
        else plan(problem, q.device, call.settings.backend, moves=QKV, needs=of)
        for of in (None, QKV)
    )
    pairs = pairs_of(call, problem)
    flops = forward_flops(pairs, problem.head_dim, problem.head_dim_v)
    separate = call.tensors._replace(v=None) if problem.latent else call.tensors  # its bytes are those of k
    inputs = sum(x.numel() * x.element_size() for x in separate.flat() if x is not None)
    rows = q.numel() // max(problem.head_dim, 1)
    moved = least_bytes(inputs, rows, problem.head_dim_v, call.out_dtype.itemsize)
    rates = machine(q.device, call.out_dtype)
    bound = roofline(flops, moved, rates)
    file = rates_file(q.device)
    return Explanation(
        problem=in_words(problem),
        device=describe_device(q.device).name,
        backend=chosen.backend,
        tile=tile,
        unsplit=unsplit(chosen, call),
        why_not=dict(chosen.why),
        candidates=expected(call, problem, describe_device(q.device)) if file else {},
        tangents_candidates=expected_along(problem, describe_device(q.device)) if q.is_cuda and along else {},
        rates=file,
        backward="none" if backward is None else backward.backend,
        backward_tile=backward_tile,
        backward_rest={} if backward is None or backward.rest is None else backward.rest.in_words(),
        tangents="none" if along is None else along.backend,
        tangents_why_not={} if along is None else dict(along.why),
        second="none" if second is None else second.backend,
        second_why_not={} if second is None else dict(second.why),
        tangents_tile="" if along is None else words_of(tangent_tiles_of(along)),
        kernels=kernels_in_words(call, chosen, None if backward is None else (backward, needs)),
        visible_pairs=pairs,
        mask_blocks=mask_blocks(call, problem),
        flops_forward=flops,
        flops_backward=backward_flops(pairs, problem.head_dim, problem.head_dim_v),
        bytes_forward=moved,
        intensity=flops / max(moved, 1),
        **rates._asdict(),
        limit=bound.limit,
        seconds_at_limit=bound.seconds,
    )


def rates_file(device: torch.device) -> str:
    """The file of rates for a device, and how it was scaled; empty where no times are expected."""
    if device.type == "cpu" and SUPPORT["cpu"].unusable() is None:
        from ..backend.cpu.rates import rates_here  # reads a file

        return f"{rates_here().about}, on one thread"
    return rates_of(describe_device(device)).about if device.type == "cuda" else ""


def expected(call: Call, problem: Problem, device: Device) -> dict[str, float]:
    """The best ways to run forward, in words, and their expected microseconds."""
    return best(candidates(problem.bucketed(), device, None), lambda plan: tiles_of(plan, call))


def expected_along(problem: Problem, device: Device) -> dict[str, float]:
    """As `expected`, of forward mode by q, k and v."""
    return best(candidates(problem.bucketed(), device, None, QKV), tangent_tiles_of)


def best(ways: Iterable[tuple[str, Candidate]], tiles_of: Callable[[Plan], dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, way in ways:
        named = tiles_of(Plan(name, way.tile, way.num_splits, ())).items()
        tiles = ", ".join(f"{kernel} {x}" for kernel, x in named if x is not None)
        splits = f", {way.num_splits} splits" * (way.num_splits > 1)
        found.setdefault(f"{name}, {tiles}{splits}", way.microseconds)
        if len(found) == BEST:
            break
    return found


def needs_of(call: Call) -> Needs:
    """The gradients of q, k and v, and of features whose tensors require one."""
    tensors = [getattr(call.tensors, name) for name in DIFFERENTIABLE[3:]]
    return Needs(True, True, True, *(x is not None and x.requires_grad for x in tensors))


def backward_plan(problem: Problem, device: torch.device, backend: str, needs: Needs) -> Plan | None:
    """`None` where the named backend has no backward pass for the problem."""
    try:
        return plan(problem, device, backend, needs=needs)
    except BackendError:
        return None


def kernels_in_words(call: Call, forward: Plan, backward: tuple[Plan, Needs] | None) -> str:
    """The origin of the GPU kernels of both passes; empty for the other backends."""
    if forward.backend not in ON_GPU:
        return ""
    both = backward if backward is not None and backward[0].backend in ON_GPU else None
    device = call.tensors.q.device
    return kernel_origin(launches_of(call, describe_device(device), forward, both), device)


def described_call(
    q: Tensor, k: Tensor, v: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, keywords: dict[str, Any]
) -> Call:
    """The normalized call of a public function's arguments; `refuse` answers what it does not take."""
    layout = DENSE if cu_q is None else VARLEN
    tensor_names = [name for name, x in FEATURES.items() if x.public and layout in x.layouts]
    defaults: dict[str, Any] = dict.fromkeys(
        (
            "window",
            "attention_chunk",
            "scale",
            "softcap",
            "score_mod",
            "dropout_seed",
            "num_splits",
            "deterministic",
            "v_dim",
            "out_dtype",
        )
    )
    defaults |= {"causal": False, "dropout_p": 0.0, "batch_invariant": False, "backend": "auto"}
    if cu_q is not None:
        defaults |= {"max_seqlen_q": None, "max_seqlen_k": None}
    known = {*tensor_names, *defaults, "return_lse", "out"} | ({"qv"} if cu_q is not None else set())
    if unknown := {name: value for name, value in keywords.items() if name not in known}:
        refuse("attention" if cu_q is None else "attention_varlen", (), unknown)
    tensors = {"q": q, "k": k, "v": v} | {name: keywords.get(name) for name in tensor_names}
    if cu_q is not None:
        tensors |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    arguments = defaults | {name: value for name, value in keywords.items() if name in defaults}
    function = "attention" if cu_q is None else "attention_varlen"
    if cu_q is not None and (qv := keywords.get("qv")) is not None:
        tensors["q"], tensors["k"], arguments["v_dim"], _ = with_query_of_values(function, q, k, v, qv)
        tensors["v"] = None
    keys, values, of_k, of_v = (tensors.get(name) for name in ("k", "v", "k_descale", "v_descale"))
    values, of_v, arguments["v_dim"] = values_of(function, keys, values, of_k, of_v, arguments["v_dim"])
    tensors |= {"v": values, "v_descale": of_v}
    return normalize(function, tensors, **arguments)


def pairs_of(call: Call, problem: Problem) -> int:
    """Visible pairs by position; a mask is not counted, and device-side lengths count as their maximum."""
    t, window = call.tensors, problem.window
    if call.layout == "dense":
        lengths = [(problem.seqlen_q, problem.seqlen_k)] * problem.batch
    elif host_readable(t.q):
        assert t.cu_seqlens_q is not None
        seqlens_k = t.cu_seqlens_k.diff() if t.seqused_k is None and t.cu_seqlens_k is not None else t.seqused_k
        assert seqlens_k is not None
        seqlens_q = t.cu_seqlens_q.diff() if t.seqused_q is None else t.seqused_q
        lengths = list(zip(seqlens_q.tolist(), seqlens_k.tolist(), strict=True))
    else:
        lengths = [(problem.seqlen_q, problem.seqlen_k)] * problem.batch
    counted = {pair: visible_pairs(window, *pair) for pair in set(lengths)}
    return problem.num_heads_q * sum(counted[pair] for pair in lengths)


def tiles_in_words(call: Call, forward: Plan, backward: Plan | None, needs: Needs) -> tuple[str, str]:
    """The tiles of the forward pass, with backward's if one backend has both, and backward's."""

    tiles = tiles_of(forward, call)
    if backward is None:
        return words_of(tiles), ""
    others = tiles_of(backward, call, needs if backward.rest is None else backward.rest.own)
    return words_of(tiles | others if backward.backend == forward.backend else tiles), words_of(others)


def words_of(tiles: dict[str, Any]) -> str:
    return ", ".join(f"{name} {x}" for name, x in tiles.items() if x is not None)
