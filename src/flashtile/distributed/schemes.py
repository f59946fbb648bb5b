"""The scheme of a call: by its name, or the one that the model of time takes to be the fastest."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..backend.rates import fastest, memory
from ..call import sharding
from ..call.call import Call
from ..errors import ArgumentError
from ..iomodel import backward_flops, forward_flops
from .group import EXAMPLE, Group, grid_of
from .layout import Layout, Piece
from .simulate import RATES, Rates, Simulation, Workload, accepted_schemes, predict, preferred
from .visible import Document
from .work import Visible

LOAD_SECONDS = 0.5  # time of each pass, on a GPU, whose clock falls under load
MEASURED: list[tuple[str, frozenset[int], Rates]] = []  # types of device and the ranks that measured, the latest first


def scheme_of(scheme: str, mesh: DeviceMesh, work: Workload) -> str:
    """The scheme by its name, or the one that "auto" takes."""
    accepted = accepted_schemes(tuple(mesh.shape), work.heads)
    if scheme == "auto" and accepted:
        return fastest_scheme(tuple(mesh.shape), work, rates_of(mesh))
    if scheme not in accepted:
        names = " or ".join(map(repr, ["auto", *accepted])) if accepted else f"heads that {mesh.shape[-1]} divides"
        raise ArgumentError("scheme", scheme, f"for {work.heads} query heads on this mesh, {names}", EXAMPLE)
    return scheme


@functools.lru_cache(maxsize=1024)
def fastest_scheme(mesh: tuple[int, ...], work: Workload, rates: Rates) -> str:
    """The scheme that the model takes to be the fastest; the same on all ranks."""
    return preferred(predict(name, mesh, work, rates) for name in accepted_schemes(mesh, work.heads)).scheme


def predictions(mesh: DeviceMesh, work: Workload) -> list[Simulation]:
    """The predictions of all schemes that the mesh has."""
    rates = rates_of(mesh)
    return [predict(name, tuple(mesh.shape), work, rates) for name in accepted_schemes(tuple(mesh.shape), work.heads)]


def rates_of(mesh: DeviceMesh) -> Rates:
    """The rates that all ranks of a mesh have measured together last, on this mesh or a larger one; else the rates of a
    table. So all of them have the same, and choose the same scheme.
    """
    if MEASURED:
        ranks = ranks_of(mesh)
        for device_type, measured, rates in MEASURED:
            if device_type == mesh.device_type and measured >= ranks:
                return rates
    return RATES.get(mesh.device_type) or RATES["cuda"]


@functools.lru_cache(maxsize=64)
def ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def workload_of(call: Call, rows: Layout, keys: Layout, documents: tuple[Document, ...] | None) -> Workload:
    """The shapes of a call. The pairs that are visible by position count: a mask would have to be read back."""
    t, everything = call.tensors, Document(Piece(0, rows.length), Piece(0, keys.length))
    visible = Visible(call.settings.window, (everything,) if documents is None else documents)
    return Workload(
        rows, keys, visible, t.q.shape[0], t.q.shape[1], t.k.shape[1], t.q.shape[3], t.v.shape[3],
        t.q.element_size(),
    )  # fmt: skip


def measure_rates(mesh: DeviceMesh, *, num_bytes: int = 2**26, dtype: torch.dtype = torch.bfloat16) -> Rates:
    """Measure the rates of a mesh's links and of attention on its ranks, which "auto" and `explain` take from then on,
    for this mesh and for meshes of some of its ranks.

    All ranks must take part, and have the same rates afterwards: the slowest rank's. It waits for the devices.

    Example:
        >>> rates = flashtile.distributed.measure_rates(mesh)  # doctest: +SKIP

    Args:
        mesh: a `DeviceMesh` with one or two dimensions.
        num_bytes: that travel in a transfer.
        dtype: the attention's.

    Returns:
        The `Rates`.

    Raises:
        ArgumentError: `mesh` is not one of those.
    """
    grid = grid_of(mesh)
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    groups = [grid.outer, grid.inner][: mesh.ndim]
    buffer, least = (torch.zeros(n, dtype=torch.uint8, device=device) for n in (num_bytes, 8))
    latency = max(seconds_of_transfer(group, least) for group in groups)
    links = [num_bytes / max(seconds_of_transfer(group, buffer) - latency, 1e-9) for group in groups]
    rates = torch.tensor([*attention_rates(device, dtype), memory(device), -latency, *links], dtype=torch.float64)
    forward, backward, copies, latency, *links = torch.stack(grid.gather(rates)).amin(dim=0).tolist()
    found = Rates(forward, tuple(links), -latency, backward, copies)
    keep_rates(mesh, found)
    return found


def keep_rates(mesh: DeviceMesh, rates: Rates) -> None:
    """Put the rates of a mesh first, in place of rates of as many or fewer of its ranks."""
    ranks = ranks_of(mesh)
    MEASURED[:] = [x for x in MEASURED if x[0] != mesh.device_type or not x[1] <= ranks]
    MEASURED.insert(0, (mesh.device_type, ranks, rates))


def seconds_of_transfer(group: Group, x: Tensor) -> float:
    """Seconds of passing a tensor on to the next rank while one arrives."""
    if group.size == 1:
        return 0.0

    def transfer() -> None:
        group.pass_on(x, x.numel()).wait()

    transfer()
    return fastest(transfer, x.device, repeats=5)


def attention_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s of forward and backward of causal attention, under a load that is long enough for its clock."""
    from ..api.attention import attention

    seqlen, heads = (512, 2) if device.type == "cpu" else (16384, 16)
    leaves = [torch.randn(1, heads, seqlen, 128, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
    pairs = heads * seqlen * (seqlen + 1) / 2
    with sharding.inside(None):
        out = attention(*leaves, causal=True)
        assert isinstance(out, Tensor)
        dout = torch.randn_like(out)

        def forward() -> None:
            attention(*leaves, causal=True)

        def backward() -> None:
            torch.autograd.grad(out, leaves, dout, retain_graph=True)

        passes = (forward, forward_flops(1, 128, 128)), (backward, backward_flops(1, 128, 128))
        seconds = [fastest(run, device, repeats=2) for run, _ in passes]
        for run, taken in zip((backward, forward), seconds[::-1], strict=True):
            repeat(run, device, taken)
        rates = [
            pairs * flops / repeat(run, device, taken) for (run, flops), taken in zip(passes, seconds, strict=True)
        ]
    return rates[0], rates[1]


def repeat(run: Callable[[], None], device: torch.device, seconds: float) -> float:
    """The mean time of a call in a row of calls, of `seconds` each or more, without a pause for the device."""
    calls = max(1, round(LOAD_SECONDS / seconds)) if device.type != "cpu" else 2
    return fastest(lambda: [run() for _ in range(calls)], device, repeats=1) / calls
