"""The launches of forward mode and of second derivatives, by each kind of their kernels."""

from collections.abc import Iterator
from unittest import mock

import torch
from forced import in_order

from flashtile.api.explain import QKV, described_call
from flashtile.backend.gpu import cost
from flashtile.backend.gpu.replay import Recorder
from flashtile.backend.triton import support
from flashtile.backend.triton.launch.second import launch_second
from flashtile.backend.triton.launch.second_blocks import launch_second_blocks
from flashtile.backend.triton.launch.tangents import launch_tangents
from flashtile.backend.triton.tile_config import BlockedSecond
from flashtile.call.call import Call, row_stats_shape
from flashtile.call.plan import Candidate, Plan
from flashtile.call.problem import Problem

from .launches import Launch, device_of, recorded

HEAD_DIMS = (64, 128, 256)


def call_of_width(head_dim: int) -> Call:
    q, k = (torch.empty(1, heads, 512, head_dim, dtype=torch.bfloat16) for heads in (4, 2))
    return described_call(q, k, k, None, None, {"causal": True})


def launches_of_derivatives(head_dim: int, arch: str) -> Iterator[tuple[str, Launch]]:
    """Launches by name: of forward mode by the first tile of each kernel, and of the kernels behind it."""
    call, device = call_of_width(head_dim), device_of(arch)
    problem = Problem.describe(call)
    along = [torch.empty_like(x) for x in call.tensors[:3] if x is not None]
    with mock.patch.object(cost, "ranked", in_order):
        ways = support.tangent_candidates(problem, device, QKV)
        second, *_ = support.second_candidates(problem, device, QKV, QKV)
    kinds: dict[bool, Candidate] = {}
    for way in ways:
        kinds.setdefault(way.tile.tangents.mma, way)
    for way in kinds.values():
        with recorded() as found:
            launch_tangents(Recorder([*call.tensors.flat(), *along]), plan_of(way), call, QKV)
        yield from ((f"forward mode, hdim {head_dim}", launch) for launch in found)
    out, row_stats = torch.empty_like(call.tensors.q), torch.empty(row_stats_shape(call))
    launch, before = launch_second, [out, row_stats, torch.empty_like(out), torch.empty_like(row_stats)]
    if isinstance(second.tile.second, BlockedSecond):
        launch, before = launch_second_blocks, before[:2]
    with recorded() as found:
        inputs = [*call.tensors.flat(), *along, *before, torch.empty_like(out), None]
        launch(Recorder(inputs), plan_of(second), call, QKV, QKV)
    for launched in found:
        if launched.kernel.fn.__module__.rpartition(".")[2].startswith(("second", "row_products")):
            yield f"second derivative, hdim {head_dim}", launched


def plan_of(way: Candidate) -> Plan:
    return Plan("triton", way.tile, 1, ())
