"""Host code of the forward pass: allocate results, launch the kernel."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...call.call import Call, new_rows, row_stats_shape, split_row_stats
from ...call.eight_bit import FORMATS
from ...call.eight_bit_layouts import dequantized, in_pages
from ...call.plan import Plan
from ...call.problem import accumulation_dtype
from ..replays import ForwardReplay
from ..scalars import rows_last, splits_of
from . import arguments as args
from . import targets, threads, workspace
from .blocks import BlockTable, table_strides, table_tensors
from .distance_table import with_distance_table
from .launch import KernelLaunch, TensorSpec, run
from .lengths import chunk, lengths, max_threads, used_splits
from .machine_code import CpuKernel, function_address
from .recording import recorded
from .support import INVARIANT_KEYS
from .variant import FORWARD


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a call."""
    return record_forward(plan, call)[1]


def record_forward(plan: Plan, call: Call) -> tuple[Any, tuple[Tensor, Tensor]]:
    """As `forward`, with the function that repeats it for calls of the same layout: `None` for packed calls with a
    mask function, whose blocks depend on the values of their lengths.
    """
    if call.tensors.k.dtype in FORMATS:
        if call.tensors.q.dtype in FORMATS:
            return replay_dequantized(plan, call)
        call = in_pages(call)
    launch, tensors, results = launched_forward(plan, call)
    if call.layout == "dense":
        recording = recorded(call, launch, tensors, results)
        return functools.partial(replay_forward, launch) if recording is None else ForwardReplay(recording), results
    return functools.partial(replay_forward, launch) if call.settings.mask_mod is None else None, results


def replay_dequantized(plan: Plan, call: Call) -> tuple[Any, tuple[Tensor, Tensor]]:
    """As `record_forward`, of queries of 8 bits: the kernel multiplies in float32, and `out` is rounded behind it."""
    launch, _, results = launched_forward(plan, in_float32(call))

    def replay(call: Call) -> tuple[Tensor, Tensor]:
        return rounded_out(call, *replay_forward(launch, in_float32(call)))

    return None if call.settings.mask_mod is not None else replay, rounded_out(call, *results)


def in_float32(call: Call) -> Call:
    """A call with queries of 8 bits as one whose queries and `out` are float32."""
    call = dequantized(call)
    return call._replace(tensors=call.tensors._replace(out=None), settings=call.settings._replace(out_dtype=None))


def rounded_out(call: Call, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """`out` in the dtype of the call's, in the tensor for it if there is one."""
    given = call.tensors.out
    return (out.to(call.out_dtype) if given is None else given.copy_(out)), lse


def launched_forward(plan: Plan, call: Call) -> tuple[KernelLaunch, dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Run a forward pass; its launch, the tensors of it, and `out` and `lse`."""
    call = with_distance_table(call)
    q, k, v = (rows_last(x) for x in call.tensors[:3])
    out = call.tensors.out
    out = new_rows(call.tensors.q, q.shape[1], v.shape[-1], q.dtype) if out is None else out
    lse = q.new_empty(row_stats_shape(call), dtype=accumulation_dtype(q.dtype))
    launch = forward_launch(plan, call, (q, k, v), out, lse)
    return launch, run_forward(launch, call, (q, k, v), out, lse), (out, lse)


def replay_forward(launch: KernelLaunch, call: Call) -> tuple[Tensor, Tensor]:
    call = with_distance_table(in_pages(call) if call.tensors.k.dtype in FORMATS else call)
    q, k, v = (rows_last(x) for x in call.tensors[:3])
    of_out, of_lse = launch.results
    out = of_out.new() if call.tensors.out is None else call.tensors.out
    lse = of_lse.new()
    launch = launch if call.layout == "dense" else with_lengths(launch, call)
    run_forward(launch, call, (q, k, v), out, lse)
    return out, lse


def run_forward(
    launch: KernelLaunch, call: Call, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor
) -> dict[str, Tensor]:
    """Compute `out` and `lse`; return the tensors of the launch."""
    q, k, v = inputs
    captured = args.captured_tensors(call)
    tensors = args.input_tensors(call, q, k, v)
    tensors["out"], tensors["lse"] = out, lse
    tensors.update(args.captured_table(captured))
    tensors.update(table_tensors(launch.blocks, call))
    if launch.splits > 1:
        shape = (launch.splits, *split_row_stats(q, lse)[0].shape)
        tensors["partial_out"] = lse.new_empty((*shape, v.shape[-1]))
        tensors["partial_lse"] = lse.new_empty((2, *shape) if call.keeps_residual else shape)
    run(launch, tensors)
    del captured
    fill_unused(launch, q, out, lse)
    return tensors


def fill_unused(launch: KernelLaunch, q: Tensor, out: Tensor, lse: Tensor) -> None:
    """Fill in the results of packed rows that belong to no sequence."""
    for tokens in launch.lengths.unused:
        out[tokens] = 0
        for x, value in zip(split_row_stats(q, lse), (-torch.inf, 0), strict=True):
            if x is not None:
                x[:, tokens] = value


def forward_launch(
    plan: Plan, call: Call, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor
) -> KernelLaunch:
    """Choose the variant and compute all arguments of the kernel but the addresses."""
    q, _, v = inputs
    for_decode = args.decode_target(call, plan.tile)
    target = targets.host() if for_decode is None else for_decode
    variant = args.variant_of(call, target, plan.tile.rows)
    tiles = args.uses_matrix_tiles(call, plan.tile)
    row_values = not tiles and args.whole_vectors(call, v)
    variant = variant._replace(row_values=row_values, decode=for_decode is not None, tiles=tiles)
    splits = least_splits = splits_of(call, plan.num_splits, workspace.BLOCK_N)
    if call.settings.requested_splits is None:
        least_splits = 1
    if out.dtype != q.dtype:  # which the kernel writes as combined results alone
        splits, least_splits = max(splits, 2), max(least_splits, 2)
    layout = workspace.tile_layout if tiles else workspace.forward_layout
    kernel = CpuKernel(FORWARD, variant, target)
    launch = launch_over_rows(kernel, layout, plan.tile.rows, call, inputs, (out, lse))
    split_keys = INVARIANT_KEYS if plan.tile.queries == "one" else None
    if split_keys is not None:  # merged also where there is one part, as in another batch
        splits, least_splits = max(splits, 2), 2
    return with_lengths(launch._replace(splits=splits, least_splits=least_splits, split_keys=split_keys), call)


def launch_over_rows(
    kernel: CpuKernel,
    layout: Callable[..., workspace.Layout],
    most_rows: int,
    call: Call,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
) -> KernelLaunch:
    """The launch of a kernel whose tasks have `most_rows` query rows, rounded up to panels, without what depends on the
    lengths (`with_lengths`); `results` are out and lse.
    """
    (q, k, v), (out, lse) = inputs, results
    values = args.call_scalars(call, kernel.variant, q, k, v)
    rows = kernel.variant.vectors * (kernel.target.vector_bytes // lse.element_size())
    panels = -(-most_rows // rows)
    task_rows = panels * rows, min(most_rows, panels * rows)
    of_call = lengths(call, values["num_heads_kv"], values["groups"], task_rows[0])
    table = BlockTable.of(call, of_call, rows)
    values |= {
        **table_strides(table),
        **args.strides("out", out),
        **args.lse_strides(q, lse),
        "panels": panels,
        "out_is_real": int(out.dtype == lse.dtype),
        "work_size": workspace.num_bytes(layout, lse.element_size(), rows, panels, q.shape[-1], v.shape[-1]),
    }
    return KernelLaunch(
        threads.WORKER(function_address(*kernel)),
        args.pack(values),
        0,
        values["work_size"],
        of_call,
        results=(TensorSpec.of(out), TensorSpec.of(lse)),
        blocks=table,
        task_rows=task_rows,
    )


def with_lengths(launch: KernelLaunch, call: Call) -> KernelLaunch:
    """The launch with the tasks of a call's lengths."""
    (rows, rows_in_use), heads_kv = launch.task_rows, args.heads_kv(call)
    of_call = lengths(call, heads_kv, call.tensors.q.shape[1] // heads_kv, rows)
    splits = used_splits(launch.splits, launch.least_splits, of_call.max_seqlen_k, launch.split_keys)
    tasks = of_call.tasks * splits
    block = args.with_counters(launch.block, of_call.tasks) if launch.splits > 1 else launch.block
    fields = {
        "sequences": of_call.table.ctypes.data,
        "tasks": tasks,
        "batch": of_call.batch,
        "splits": splits,
        "chunk": chunk(of_call.max_seqlen_k, splits, launch.split_keys),
    }
    return launch._replace(
        block=args.with_fields(block, fields),
        max_threads=min(tasks, max_threads(call, of_call, rows_in_use)),
        lengths=of_call,
    )
