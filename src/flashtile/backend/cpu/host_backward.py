"""Host code of the backward pass: split the work into tasks, allocate gradients, launch the kernel, reduce."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Needs, new_rows, split_row_stats
from ...call.plan import Plan
from ..epilogue import RowStats, requested_from_rows
from ..replays import BackwardReplay
from ..scalars import rows_last
from . import arguments as args
from . import targets, threads, workspace
from .blocks import BlockTable, table_strides, table_tensors
from .captured_gradients import CapturedGradients, captured_gradients
from .distance_table import needs_with_table, with_distance_table, without_table
from .epilogue import gather_pages, scatter_to_pages, slope_gradient, without_padding
from .launch import KernelLaunch, TensorSpec, run
from .lengths import Lengths, chunk, lengths, max_threads
from .machine_code import function_address
from .recording import recorded
from .variant import BACKWARD, TaskSplit, Variant

MIN_TASKS = 16  # keys are split where heads and sequences alone give fewer
MIN_SPLIT_KEYS = 256
MAX_CAPTURED_BYTES = 2**26  # for the gradients of a score_mod's tensors, which most tasks have sums of their own of


class BackwardTasks(NamedTuple):
    """The kernel variant, the sequences, and the tasks of a backward pass."""

    variant: Variant
    lengths: Lengths
    split: TaskSplit
    captured: CapturedGradients


class GradientBuffers(NamedTuple):
    """The tensors that a backward kernel writes; `None` for a gradient that was not requested."""

    delta: Tensor
    dq: Tensor | None = None  # [splits, ...], or the result of the one split
    dk: Tensor | None = None  # rows padded to whole vectors
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dbias_error: Tensor | None = None  # rounding errors of sums with many terms
    dslopes: Tensor | None = None  # [splits, *lse.shape]


UNINITIALIZED = ("delta", "dq", "dk", "dv")  # dense calls: the kernel stores all elements. Others begin with zeros


class BackwardStep(NamedTuple):
    """A launch of the kernel, and what the host does around it."""

    launch: KernelLaunch
    needs: Needs
    captured: CapturedGradients
    buffers: tuple[TensorSpec | None, ...]  # as in `GradientBuffers`

    def new_buffers(self) -> GradientBuffers:
        """The buffers of a dense call, allocated again."""
        buffers = [None if spec is None else spec.new() for spec in self.buffers]
        for x in buffers[len(UNINITIALIZED) :]:
            if x is not None:
                x.zero_()
        return GradientBuffers(*buffers)  # type: ignore[arg-type]


class RowTensors(NamedTuple):
    """out, lse (with its residual, if that is kept) and their gradients, as the kernel reads them."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    """The requested gradients of a call, in the accumulation dtype."""
    return record_backward(plan, call, needs, out, lse, dout, dlse)[1]


def record_backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Any, Gradients]:
    """As `backward`, with the function that repeats it for calls of the same layout, or `None`, as `record_forward`;
    its gradients are flat.
    """
    if call.layout == "paged":
        packed, token = gather_pages(call)
        grads = backward(plan, packed, needs, out, lse, dout, dlse)
        dk, dv = (scatter_to_pages(dx, token, x) for dx, x in ((grads.k, call.tensors.k), (grads.v, call.tensors.v)))
        return None, grads._replace(k=dk, v=dv)
    of_call, call, needs = call, with_distance_table(call), needs_with_table(call, needs)
    q, k, v = (rows_last(x) for x in call.tensors[:3])
    rows, tasks = row_tensors(out, lse, dout, dlse), backward_tasks(plan, call, needs)
    buffers = allocate_gradients(call, needs, split_row_stats(q, rows.lse)[0], tasks.lengths, tasks.split.splits)
    launch = backward_launch(call, tasks, (q, k, v, rows.out, rows.dout), rows.lse, buffers)
    specs = tuple(None if x is None else TensorSpec.of(x) for x in buffers)
    step = BackwardStep(launch, needs, tasks.captured, specs)
    grads, tensors = run_backward(step, call, (q, k, v), rows, buffers)
    grads = without_table(of_call, needs, grads)
    if call.layout != "dense":
        return None, grads
    recording = recorded(call, launch, tensors, grads.flat(), (out, lse, dout, dlse))
    return functools.partial(replay_backward, step) if recording is None else BackwardReplay(recording), grads


def replay_backward(
    step: BackwardStep, call: Call, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Sequence[Tensor | None]:
    of_call, call = call, with_distance_table(call)
    q, k, v = (rows_last(x) for x in call.tensors[:3])
    rows = row_tensors(out, lse, dout, dlse)
    grads, _ = run_backward(step, call, (q, k, v), rows, step.new_buffers())
    return without_table(of_call, step.needs, grads).flat()


def row_tensors(out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None) -> RowTensors:
    out = rows_last(out)
    dout = out.new_zeros(out.shape[-1]).expand(out.shape) if dout is None else rows_last(dout.to(out.dtype))
    return RowTensors(out, lse.contiguous(), dout, None if dlse is None else dlse.to(lse.dtype).contiguous())


def run_backward(
    step: BackwardStep,
    call: Call,
    inputs: tuple[Tensor, Tensor, Tensor],
    rows: RowTensors,
    buffers: GradientBuffers,
) -> tuple[Gradients, dict[str, Tensor]]:
    """The gradients, and the tensors of the launch."""
    t, (q, k, v), launch = call.tensors, inputs, step.launch
    captured, dcaptured = args.captured_tensors(call), step.captured.allocate(rows.lse.dtype)
    tensors = args.input_tensors(call, q, k, v)
    for fields in (rows, buffers):
        tensors.update([(name, x) for name, x in zip(fields._fields, fields, strict=True) if x is not None])
    tensors.update(args.captured_table([*captured, *dcaptured]))
    tensors.update(table_tensors(launch.blocks, call))
    run(launch, tensors)
    del captured
    dq, dslopes = buffers.dq, buffers.dslopes
    if dq is not None:
        if launch.splits > 1:
            dq = torch.sum(dq, 0, out=new_rows(t.q, q.shape[1], q.shape[-1], dq.dtype))
        for tokens in launch.lengths.unused:
            dq[tokens] = 0
    lse, residual = split_row_stats(q, rows.lse)
    stats = RowStats(t.sinks, lse, buffers.delta, lse, rows.dlse, residual)
    grads = Gradients(
        q=dq,
        k=without_padding(t.k, buffers.dk),
        v=without_padding(t.v, buffers.dv),
        bias=buffers.dbias,
        alibi_slopes=None if dslopes is None else slope_gradient(call, dslopes.sum(dim=0)),
        score_mod_tensors=step.captured.sums(dcaptured),
        **{name: gradient(stats) for name, gradient in requested_from_rows(step.needs, t)},
    )
    return grads, tensors


def backward_tasks(plan: Plan, call: Call, needs: Needs) -> BackwardTasks:
    """Choose the variant and split the work."""
    variant = args.variant_of(call, targets.host(), plan.tile.rows)
    variant = variant._replace(bias_gradient=needs.bias, slope_gradient=needs.alibi_slopes)
    variant = variant._replace(row_values=args.whole_vectors(call, call.tensors.q))
    variant = args.with_derivative(variant, call, needs)
    heads_kv = args.heads_kv(call)
    groups = call.tensors.q.shape[1] // heads_kv
    of_call = lengths(call, heads_kv, groups, variant.vectors * args.vector_lanes(call))
    choices = []
    for joined in itertools.product((False, True), repeat=3):
        split = split_tasks(call, needs, of_call, *joined)
        captured = captured_gradients(call, variant, needs, (of_call.batch, heads_kv), split)
        choices.append(BackwardTasks(variant, of_call, split, captured))
        if captured.num_bytes <= MAX_CAPTURED_BYTES:
            return choices[-1]
    return min(choices, key=lambda x: x.captured.num_bytes)


def split_tasks(
    call: Call, needs: Needs, lengths: Lengths, one_split: bool, all_sequences: bool, all_heads: bool
) -> TaskSplit:
    """A task for each sequence, key head and split, but for what shares a dbias, and what the last arguments join. The
    split does not depend on the number of threads, so that results do not either.
    """
    t = call.tensors
    shared = [needs.bias and t.bias is not None and n == 1 for n in (t.bias.shape if t.bias is not None else ())]
    share_b, share_h, _, share_j = shared or (False,) * 4
    share_b, share_h, share_j = share_b or all_sequences, share_h or all_heads, share_j or one_split
    count = (1 if share_b else lengths.batch) * (1 if share_h else args.heads_kv(call))
    splits = 1 if share_j else max(1, min(MIN_TASKS // max(count, 1), lengths.max_seqlen_k // MIN_SPLIT_KEYS))
    return TaskSplit(count * splits if lengths.batch else 0, splits, int(share_b), int(share_h))


def allocate_gradients(call: Call, needs: Needs, lse: Tensor, lengths: Lengths, splits: int) -> GradientBuffers:
    """Gradient buffers: uninitialized where the kernel stores every element, else zeros. Packed tokens that belong to
    no sequence are never stored.
    """
    t, real = call.tensors, lse.dtype
    bias = t.bias if needs.bias else None
    compensated = bias is not None and pairs_per_bias_element(call, bias, lengths) > workspace.MAX_PLAIN_TERMS
    dk, dv = (
        new_rows(x, args.heads_kv(call), workspace.round_up(x.shape[-1], args.vector_lanes(call)), real)
        if needed
        else None
        for x, needed in ((t.k, needs.k), (t.v, needs.v))
    )
    if call.layout != "dense":
        for x in (dk, dv):
            if x is not None:
                x.zero_()
    return GradientBuffers(
        delta=torch.empty_like(lse) if call.layout == "dense" else torch.zeros_like(lse),
        dq=allocate_dq(t.q, real, splits) if needs.q else None,
        dk=dk,
        dv=dv,
        dbias=None if bias is None else bias.new_zeros(bias.shape, dtype=real),
        dbias_error=bias.new_zeros(bias.shape, dtype=real) if bias is not None and compensated else None,
        dslopes=lse.new_zeros((splits, *lse.shape)) if needs.alibi_slopes else None,
    )


def allocate_dq(q: Tensor, real: torch.dtype, splits: int) -> Tensor:
    """`[splits, ...]`; with one split `dq` itself, in the layout of q."""
    if splits == 1:
        return new_rows(q, q.shape[1], q.shape[-1], real)
    return q.new_empty((splits, *q.shape), dtype=real)


def pairs_per_bias_element(call: Call, bias: Tensor, lengths: Lengths) -> int:
    """The largest number of query-key pairs that share an element of the bias."""
    heads = call.tensors.q.shape[1]
    rows = lengths.max_rows * args.heads_kv(call) // heads
    sizes = (lengths.batch, heads, rows, lengths.max_seqlen_k)
    return math.prod(size for n, size in zip(bias.shape, sizes, strict=True) if n == 1)


def backward_launch(
    call: Call, tasks: BackwardTasks, inputs: tuple[Tensor, ...], lse: Tensor, buffers: GradientBuffers
) -> KernelLaunch:
    """Compute all arguments of the kernel but the addresses; `inputs` are q, k, v, out and dout."""
    q, k, v, out, dout = inputs
    variant, lengths, split, _ = tasks
    values = args.call_scalars(call, variant, q, k, v)
    dq, dbias = buffers.dq, buffers.dbias
    of_split = dq if dq is None or split.splits == 1 else dq[0]
    of_rows = {"out": out, "dout": dout, "dk": buffers.dk, "dv": buffers.dv, "dq": of_split}
    for name, x in of_rows.items():
        values |= {} if x is None else args.strides(name, x)
    lanes, widths = args.vector_lanes(call), (q.shape[-1], v.shape[-1])
    rows = variant.vectors * lanes
    split_keys = chunk(lengths.max_seqlen_k, split.splits)
    total_keys = min(split_keys, lengths.max_seqlen_k) if lengths.max_rows > workspace.ROWS_PER_CARRY else 0
    layout = (buffers.delta.element_size(), rows, lanes, *widths, total_keys)
    table = BlockTable.of(call, lengths, rows)
    values |= {
        **args.lse_strides(q, lse),
        **table_strides(table),
        **({} if dbias is None else args.pair_strides("dbias", dbias)),
        "dq_split": 0 if dq is None or split.splits == 1 else dq.stride(0),
        "sequences": lengths.table.ctypes.data,
        "tasks": split.tasks,
        "batch": lengths.batch,
        "panels": 1,
        "splits": split.splits,
        "chunk": split_keys,
        "total_keys": total_keys,
        "share_b": split.share_b,
        "share_h": split.share_h,
        "work_size": workspace.num_bytes(workspace.backward_layout, *layout),
    }
    worker = threads.WORKER(function_address(BACKWARD, variant, targets.host()))
    count = min(split.tasks, max_threads(call, lengths, rows))
    return KernelLaunch(worker, args.pack(values), count, values["work_size"], lengths, split.splits, blocks=table)
