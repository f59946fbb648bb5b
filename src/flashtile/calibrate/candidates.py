"""All ways to run a call on a GPU: its forward pass, its backward pass or forward mode."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..api.explain import described_call, needs_of
from ..backend.gpu.cost import Cost
from ..backend.gpu.decoding import is_decoding
from ..bench.cell import Cell
from ..bench.inputs import make_case
from ..call.call import Call, Needs, Tangents
from ..call.device import Device, describe_device
from ..call.plan import Plan
from ..call.problem import Problem
from ..dispatch.planner import candidates_of, declines_on_device

BACKENDS = ("hopper", "triton")
FEW_FEATURES = 64  # above which a second backend's ways are not all measured


class Subject(NamedTuple):
    """A cell's call, what its backward pass needs or what moves in forward mode, and the gradient of its result."""

    call: Call
    needs: Needs | None  # needs of a cell of backward
    moves: Needs | None  # inputs that move in a cell of forward mode
    dout: torch.Tensor

    @classmethod
    def of(cls, cell: Cell, device: torch.device) -> "Subject":
        case = make_case(cell, device)
        arguments = dict(case.arguments)
        q, k, v = (arguments.pop(name) for name in "qkv")
        cu_q, cu_k = arguments.pop("cu_seqlens_q", None), arguments.pop("cu_seqlens_k", None)
        call = described_call(q, k, v, cu_q, cu_k, arguments)
        assert case.dout is not None
        still = (False,) * len(call.tensors.score_mod_tensors)
        moves = Needs(q=True, k=True, v=True, score_mod_tensors=still) if cell.moves else None
        return cls(call, needs_of(call) if cell.differentiates else None, moves, case.dout)

    @property
    def problem(self) -> Problem:
        return Problem.describe(self.call).bucketed()

    @property
    def tangents(self) -> Tangents:
        """Tangents of q, k and v."""
        q, k, v = (torch.randn_like(x) for x in self.call.tensors[:3])
        return Tangents(q, k, v, score_mod_tensors=(None,) * len(self.call.tensors.score_mod_tensors))


def plans(subject: Subject, *, every: bool = False) -> Iterator[tuple[str, Plan]]:
    """Plans by name, each backend's fastest first. Of a second backend's, one is enough unless it may be the
    faster one, or `every` plan is asked for.
    """
    problem, device = subject.problem, describe_device(subject.call.tensors.q.device)
    taken = False
    for backend in BACKENDS:
        if declines_on_device(backend, problem, device, subject.needs, subject.moves) is not None:
            continue
        many = (
            every
            or not taken
            or subject.moves is not None
            or max(problem.head_dim, problem.head_dim_v) <= FEW_FEATURES
            or is_decoding(problem)
        )
        found = plans_of(backend, problem, device, subject.needs, subject.moves)
        for plan in itertools.islice(found, None if many else 1):
            yield described(plan, subject), plan
        taken = True


def plans_of(
    backend: str, problem: Problem, device: Device, needs: Needs | None, moves: Needs | None
) -> Iterator[Plan]:
    for way in candidates_of(backend, problem, device, needs, moves):
        yield Plan(backend, way.tile, way.num_splits, (), None, way.microseconds)


def cost_of(plan: Plan, subject: Subject, device: Device) -> Cost:
    """What a plan does."""
    from ..backend.hopper.plan import cost as hopper
    from ..backend.triton.plan import cost as triton

    problem, needs, moves = subject.problem, subject.needs, subject.moves
    if moves is not None:
        if plan.backend == "triton":
            return triton.tangents(problem, device, plan.tile, moves, plan.num_splits)
        forward = hopper.forward(problem, device, plan.tile.forward, plan.num_splits)
        return hopper.tangents(problem, device, forward, plan.tile.tangents, moves)
    if plan.backend == "triton":
        if needs is None:
            return triton.forward(problem, device, plan.tile, plan.num_splits)
        return triton.backward(problem, device, plan.tile)
    if needs is None:
        return hopper.forward(problem, device, plan.tile.forward, plan.num_splits)
    return hopper.backward(problem, device, plan.tile.backward)


def described(plan: Plan, subject: Subject) -> str:
    """A plan's name, which tells it from others of its problem."""
    if subject.moves is not None:
        return f"{plan.backend} tangents {words_of_tangents(plan)}"
    words = hopper_words if plan.backend == "hopper" else triton_words
    return f"{plan.backend} {words(plan, backward=subject.needs is not None)}"


def words_of_tangents(plan: Plan) -> str:
    x = plan.tile.tangents
    if plan.backend == "triton":
        mma = " mma" * x.mma
        return f"{x.block_m}x{x.block_n}x{x.num_warps}x{x.num_stages}{mma} splits {plan.num_splits}"
    return f"{x.block_m}x{x.block_n}x{x.kv_stages} heads {x.heads_at_once} splits {plan.num_splits}"


def hopper_words(plan: Plan, *, backward: bool) -> str:
    if not backward:
        x = plan.tile.forward
        stages = x.kv_stages if x.kind == "float32" else x.stages
        last = 1 if x.kind == "float32" else x.last_splits
        return f"{x.block_m}x{x.block_n}x{stages} heads {x.heads_at_once} last {last} splits {plan.num_splits}"
    x = plan.tile.backward
    if x.kind == "split":
        registers = " registers" * x.dq.dout_in_registers
        return f"dq and dkdv{registers} heads {x.dkdv.heads_at_once} shared {x.dkdv.head_splits}"
    late = " late" * (x.late_dq is not None)
    shared = f"{x.head_splits}x{x.row_splits}x{x.row_chunks}"
    return f"{x.block_m}x{x.block_n}{late} heads {x.heads_at_once} shared {shared} last {x.last_splits}"


def triton_words(plan: Plan, *, backward: bool) -> str:
    x = plan.tile

    def tile(config: Any) -> str:
        numbers = f"{config.block_m}x{config.block_n}x{config.num_warps}x{config.num_stages}"
        numbers += " mma" * config.mma
        return numbers if config.precision == "ieee" else f"{numbers} {config.precision}"

    if (x.products_backward if backward else x.products) is not None:
        return "products"
    if not backward:
        return f"{tile(x.forward)} splits {plan.num_splits}"
    if x.fused is not None:
        return f"fused {tile(x.fused.tile)} {x.fused.walk} splits {x.fused.splits}"
    if x.one_loop is not None:
        return f"one loop {tile(x.one_loop)}"
    return f"dkdv {tile(x.dkdv)} dq {tile(x.dq)}"
