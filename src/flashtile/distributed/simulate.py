"""A model of a sharded call's time: bytes over links, FLOPs over rates, and which of them overlap."""

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api.settings import window_of
from ..api.signatures import Causal, MaskArgument, WindowArgument
from ..errors import ArgumentError
from ..iomodel import backward_flops, forward_flops
from .balance import visible_pairs
from .gather_plan import chunks_of
from .inputs import documents_of
from .layout import Layout, Placement, layout_of_whole
from .ulysses import times_repeated
from .visible import BLOCK, needed_keys
from .work import Visible

EXAMPLE = 'flashtile.distributed.simulate("ring", (8,), rates=rates, seqlen=65536)'


class Rates(NamedTuple):
    """The rates of a machine, for a model of time.

    Attributes:
        flops_per_second: of attention on one rank.
        bytes_per_second: that a rank sends while it receives as many, along each dimension of a mesh.
        seconds_per_message: until the first byte arrives.
        backward_flops_per_second: `None`, if they are as many as forward's.
        memory_bytes_per_second: that copies and sums between kernels read and write.
    """

    flops_per_second: float
    bytes_per_second: tuple[float, ...]
    seconds_per_message: float
    backward_flops_per_second: float | None = None
    memory_bytes_per_second: float = math.inf

    def seconds(self, num_bytes: float, dim: int, messages: int = 1) -> float:
        """The time of a transfer along a dimension of the mesh; a rate holds for all dimensions that follow, too."""
        rate = self.bytes_per_second[min(dim, len(self.bytes_per_second) - 1)]
        return 0.0 if num_bytes == 0 else num_bytes / rate + messages * self.seconds_per_message


# Round figures that only rank schemes, the same on all ranks: half precision on one H100 and NVLink 4's 450 GB/s; a
# core and a loopback device. `measure_rates` replaces them.
RATES = {"cuda": Rates(5e14, (4.5e11,), 1e-5), "cpu": Rates(2e10, (1e9,), 1e-4)}
# What the ring has to gain over other schemes: the model does not count that its calls are more and smaller. On two and
# four GPUs causal calls took 2 to 11% longer by the ring than by gathered keys, relative to predictions.
RING_MARGIN = 0.03


class Workload(NamedTuple):
    """The shapes of a call that its time depends on."""

    rows: Layout
    keys: Layout
    visible: Visible
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    itemsize: int


class Simulation(NamedTuple):
    """The predicted work and time of a call by one scheme.

    Attributes:
        scheme: its name.
        flops: of the busiest rank, in forward.
        bytes_forward: that a rank sends.
        bytes_backward: that a rank sends.
        seconds_forward: until all ranks have their results.
        seconds_backward: until all ranks have their gradients.
        speedup: time of one rank at the same rate over this time, forward and backward.
    """

    scheme: str
    flops: float
    bytes_forward: float
    bytes_backward: float
    seconds_forward: float
    seconds_backward: float
    speedup: float


class Pass(NamedTuple):
    """Bytes that a rank sends, and seconds."""

    num_bytes: float
    seconds: float


def simulate(
    scheme: str,
    mesh: tuple[int, ...],
    *,
    rates: Rates,
    seqlen: int,
    batch: int = 1,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    layout: str | Layout = "zigzag",
    causal: Causal = True,
    window: WindowArgument = None,
    mask: MaskArgument = None,
    cu_seqlens: Any = None,
) -> Simulation:
    """Predict the work and time of a call over a mesh that need not exist.

    Steps of the ring and chunks of gathered keys overlap their transfers with the computation of the one before, and
    each waits for the slowest rank; exchanges of heads overlap with nothing, and neither do copies and sums. Kernels
    run at one rate, on whole tiles.

    Example:
        >>> rates = flashtile.distributed.Rates(5e14, (4.5e11,), 1e-5)
        >>> ring = flashtile.distributed.simulate("ring", (8,), rates=rates, seqlen=2**17)
        >>> 7.9 < ring.speedup < 8
        True

    Args:
        scheme: as in `attention`; with two dimensions "ring+ulysses" or "gather+ulysses".
        mesh: the sizes of a mesh with one or two dimensions.
        rates: of a rank and of its links.
        seqlen: rows of the whole sequence, as many as keys.
        batch, heads, kv_heads, head_dim, dtype, layout, causal, window, mask: the call's.
        cu_seqlens: offsets of packed sequences, in a list or a tensor on the CPU; `seqlen` counts all tokens.

    Returns:
        A `Simulation`.

    Raises:
        ArgumentError: the mesh does not have the scheme.
    """
    ranks = torch.Size(mesh).numel()
    if len(mesh) not in (1, 2) or scheme not in accepted_schemes(mesh, heads):
        raise ArgumentError("scheme", scheme, " or ".join(accepted_schemes(mesh, heads)) or "other heads", EXAMPLE)
    whole = layout_of_whole(layout, seqlen, ranks)
    documents = None if cu_seqlens is None else documents_of(cu_seqlens, None)
    visible = visible_pairs(seqlen, seqlen, window_of("attention", causal, window), mask, documents, batch, heads)
    work = Workload(whole, whole, visible, batch, heads, kv_heads, head_dim, head_dim, dtype.itemsize)
    return predict(scheme, mesh, work, rates)


def preferred(simulations: Iterable[Simulation]) -> Simulation:
    """The scheme with the least predicted time. The ring has to be faster than others by `RING_MARGIN`."""

    def seconds(x: Simulation) -> float:
        return (x.seconds_forward + x.seconds_backward) * (1 + RING_MARGIN * x.scheme.startswith("ring"))

    return min(simulations, key=seconds)


def accepted_schemes(mesh: tuple[int, ...], heads: int) -> list[str]:
    """The schemes of a mesh, of whose last dimension Ulysses takes an equal share of heads for each rank."""
    names = ("ring", "gather", "ulysses") if len(mesh) == 1 else ("ring+ulysses", "gather+ulysses")
    return [name for name in names if "ulysses" not in name or heads % mesh[-1] == 0]


@functools.lru_cache(maxsize=1024)
def predict(scheme: str, mesh: tuple[int, ...], work: Workload, rates: Rates) -> Simulation:
    """The prediction for a workload."""
    inner = mesh[-1] if "ulysses" in scheme else 1
    over_keys = Keys(work, inner)
    forward = forward_flops(1, work.head_dim, work.head_dim_v), rates.flops_per_second
    backward = backward_flops(1, work.head_dim, work.head_dim_v), rates.backward_flops_per_second or forward[1]
    passes = []
    for is_backward, (flops, rate) in enumerate((forward, backward)):
        # FLOPs are proportional to pairs, so one pair tells those of the matrix.
        seconds = over_keys.visited * (flops / rate)
        one = gather_pass if scheme.startswith("gather") else ring_pass
        of_keys = one(over_keys, seconds, rates, backward=bool(is_backward))
        of_heads = exchange(work, inner, rates, len(mesh) - 1, with_lse=not is_backward)
        passes.append(Pass(*map(sum, zip(of_keys, of_heads, strict=True))))
    pairs = over_keys.visible
    alone = float(pairs.sum()) * inner * sum(flops / rate for flops, rate in (forward, backward))
    total = passes[0].seconds + passes[1].seconds
    of_passes = [x for pair in zip(*passes, strict=True) for x in pair]
    flops = float(pairs.sum(dim=1).max()) * forward[0]
    return Simulation(scheme, flops, *of_passes, speedup=alone / total if total > 0 else 1.0)


class Keys:
    """The parts of a call that keys travel for: pairs by ranks and owners, and elements of a rank's tensors.

    Args:
        work: the call.
        inner: ranks among which its heads are divided.
    """

    def __init__(self, work: Workload, inner: int):
        self.rows, self.keys = Placement.of(work.rows, inner), Placement.of(work.keys, inner)
        heads, width = work.heads // inner, work.head_dim + work.head_dim_v
        self.kv_heads = work.kv_heads * times_repeated(work.kv_heads, inner) // inner
        of_head = work.batch * work.heads / inner
        self.visible = work.visible.of_ranks(self.rows, self.keys) * of_head
        self.visited = work.visible.of_ranks(self.rows, self.keys, BLOCK) * of_head  # with what tiles hide
        self.needed, self.once = needed_keys(*work.visible[:2], self.rows, self.keys.length)
        self.itemsize, self.summed = work.itemsize, max(work.itemsize, 4)  # bytes, of inputs and of sums
        each = work.batch * self.kv_heads * width
        self.sent = sent_keys(self.keys, self.needed) * each  # [owners, ranks]
        self.num_own, self.num_needed = (each * x.most for x in (self.keys, self.needed))
        self.num_q, self.num_out = (work.batch * heads * self.rows.most * n for n in (work.head_dim, work.head_dim_v))
        self.packed = len(work.visible.documents) > 1
        self.one_piece = all(len(pieces) < 2 for pieces in self.rows.by_rank)
        self.chunks = len(chunks_of(heads, self.kv_heads, self.rows, self.keys, self.needed))


def ring_pass(call: Keys, seconds: Tensor, rates: Rates, *, backward: bool) -> Pass:
    """Each step computes while the next keys arrive; the last one's gradients go home on their own.

    Args:
        call: the parts.
        seconds: `[ranks, owners]` of computation.
        rates: of a rank and of its links.
        backward: whether gradients travel.
    """
    ranks, shard = len(seconds), call.num_own * call.itemsize
    returned = call.num_own * call.summed * backward
    of_rank = torch.arange(ranks)
    owners = [(of_rank - step) % ranks for step in range(ranks)]
    needed = [step for step in range(ranks) if float(call.visible[of_rank, owners[step]].max()) > 0]
    steps = [float(seconds[of_rank, owners[step]].max()) for step in range(1 + max(needed, default=0))]
    transfers = len(steps) - 1
    moved = rates.seconds(shard + returned, 0)
    total = sum(max(step, moved) for step in steps[:-1]) + steps[-1]
    home, once, summed = returned * (transfers > 0), call.itemsize, call.summed
    copied = 0.0
    if transfers > 0 and backward:
        copied = call.num_q * (2 * (once + summed) + transfers * (once + 2 * summed))
        copied += call.num_own * (2 * once + len(steps) * (once + summed) + transfers * 3 * summed)
    elif transfers > 0:  # later parts are merged in two operations
        copied = call.num_out * (2 * (once + summed) + transfers * (once + 4 * summed)) + call.num_own * 2 * once
    total += rates.seconds(home, 0) + copied / rates.memory_bytes_per_second
    return Pass(transfers * (shard + returned) + home, total)


def gather_pass(call: Keys, seconds: Tensor, rates: Rates, *, backward: bool) -> Pass:
    """Each chunk of heads computes while the next one arrives and the gradients of the one before leave; the arguments
    are `ring_pass`'s.
    """
    chunks, arriving, leaving = call.chunks, call.sent * call.itemsize, call.sent.T * call.itemsize * backward

    def transfer(sent: Tensor) -> float:
        """The time of the busiest rank, which sends and receives at once."""
        return rates.seconds(float(torch.maximum(sent.sum(dim=0), sent.sum(dim=1)).max()) / chunks, 0)

    computed = float(seconds.sum(dim=1).max()) / chunks
    first, last = transfer(arriving), transfer(leaving)
    overlapped = sum(max(computed, first * (n + 1 < chunks) + last * (n > 0)) for n in range(chunks))
    busiest = float(torch.maximum(call.sent.sum(dim=0), call.sent.sum(dim=1)).max())
    copied = 2 * call.itemsize * busiest  # into blocks
    if busiest > 0 and call.one_piece:  # own keys while the first others travel
        copied += 2 * call.itemsize * busiest
        first = max(first, 2 * call.itemsize * call.num_own / chunks / rates.memory_bytes_per_second)
    elif busiest > 0:
        copied += 2 * call.itemsize * (call.num_needed + (call.num_q if backward else call.num_out) * (not call.packed))
    if backward:
        copied += 2 * call.itemsize * (busiest if call.one_piece else call.num_own + busiest)
        copied += 0 if call.once or call.packed else (call.itemsize + call.summed) * 2 * call.num_needed
    total = first + overlapped + last + copied / rates.memory_bytes_per_second
    return Pass(float((arriving + leaving).sum(dim=1).max()), total)


def sent_keys(keys: Placement, needed: Placement) -> Tensor:
    """The number of keys that each owner sends to each other rank, `[owners, ranks]` in float64."""
    ranks = range(len(keys.by_rank))
    counts = [
        [sum(at.stop - at.start for at, _ in keys.shared(owner, needed, rank)) * (owner != rank) for rank in ranks]
        for owner in ranks
    ]
    return torch.tensor(counts, dtype=torch.float64)


def exchange(work: Workload, inner: int, rates: Rates, dim: int, *, with_lse: bool) -> Pass:
    """Rows for heads and back: q, k and v in, out and lse back; the same of gradients, but for dlse."""
    if inner == 1:
        return Pass(0.0, 0.0)
    width, times = work.head_dim + work.head_dim_v, times_repeated(work.kv_heads, inner)
    rows, keys = work.rows.rows(0), work.keys.rows(0)
    elements = work.batch * width * (work.heads * rows + work.kv_heads * times * keys)
    of_lse = work.batch * work.heads * rows * max(work.itemsize, 4) * with_lse
    exchanged = elements * work.itemsize + of_lse
    sent = exchanged * (inner - 1) / inner
    copied = 4 * exchanged  # blocks of ranks are put together, and taken apart
    return Pass(sent, rates.seconds(sent, dim, messages=4 + with_lse) + copied / rates.memory_bytes_per_second)
