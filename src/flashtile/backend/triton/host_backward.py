"""The launches of a backward pass: row statistics first, then one kernel for each kind of gradient."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Needs, Tensors, new_rows
from ...call.formulas import score_formula
from ...call.plan import Plan
from ..epilogue import RowStats, requested_from_rows, sum_to_heads
from ..gpu import replay
from ..gpu.block_lists import block_lists
from ..gpu.formula import loads
from ..gpu.kernel import Kernel
from ..gpu.pairs import with_contiguous_keys
from ..gpu.pointers import Described, Pointers
from ..gpu.replay import Recorder, Results
from ..scalars import dlse_strides, lse_strides, rows_last, strides
from . import arguments as args
from . import formulas
from .configs import KernelConfig

ROWS_AT_ONCE = 64
PREPROCESS, DKDV, DQ, DBIAS, DCAPTURED = (
    Kernel(f"{__package__}.kernels.{name}", f"{name}_kernel")
    for name in ("preprocess", "dkdv", "dq", "dbias", "dcaptured")
)


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    inputs = (*call.inputs, out, lse, dout, dlse)
    return Gradients.from_flat(replay.run(inputs, launch_backward, plan, call, needs))


def record_backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Any, Gradients]:
    """As `backward`, and the function that repeats it for calls of the same layout."""
    recording, results = replay.record((*call.inputs, out, lse, dout, dlse), launch_backward, plan, call, needs)
    return lambda call, *rows: Gradients.from_flat(recording((*call.inputs, *rows))), Gradients.from_flat(results)


def launch_backward(recorder: Recorder, plan: Plan, call: Call, needs: Needs) -> Results:
    *given, out, lse, dout, dlse = recorder.inputs
    assert out is not None
    assert lse is not None
    out, lse = recorder.op(rows_last, out), recorder.op(Tensor.contiguous, lse)
    dout = recorder.op(no_gradient, out) if dout is None else recorder.op(rows_last, dout)
    call = with_contiguous_keys(recorder, call._replace(tensors=Tensors.from_flat(given)))
    t = call.tensors
    launches = BackwardLaunches(recorder, call, dout)
    launches.preprocess(out, lse, dlse)
    dk, dv = launches.dkdv(plan.tile.dkdv) if needs.k or needs.v else (None, None)
    slopes = needs.alibi_slopes
    dq, dslopes = launches.dq(plan.tile.dq, lse, slopes) if needs.q or slopes else (None, None)
    dbias = launches.dbias(plan.tile.dq) if needs.bias else None
    if slopes:
        dslopes = recorder.op(slope_gradient, t.alibi_slopes, t.cu_seqlens_q, dslopes)
    if call.layout == "paged":  # dk and dv are by position
        dk, dv = (
            None if dx is None else recorder.op(in_pages, x, t.page_table, dx) for x, dx in ((t.k, dk), (t.v, dv))
        )
    dcaptured = launches.dcaptured(plan.tile.dq, needs.score_mod_tensors)
    from_rows = {
        name: recorder.op(partial(from_row_stats, gradient), t.sinks, lse, launches.row_stats, dlse)
        for name, gradient in requested_from_rows(needs, t)
    }
    dq, dk, dv = (dx if needed else None for dx, needed in zip((dq, dk, dv), needs, strict=False))
    grads = Gradients(
        q=dq, k=dk, v=dv, bias=dbias, alibi_slopes=dslopes, score_mod_tensors=tuple(dcaptured), **from_rows
    )
    return grads.flat()


def no_gradient(out: Tensor) -> Tensor:
    return out.new_zeros(out.shape[-1]).expand(out.shape)


class BackwardLaunches:
    """The launches of one backward pass and the arguments that they share."""

    def __init__(self, recorder: Recorder, call: Call, dout: Tensor):
        self.recorder, self.call, self.dout = recorder, call, dout
        self.q, self.k, self.v = (recorder.op(rows_last, x) for x in call.tensors[:3])
        self.pointers: Pointers = args.pointers(recorder, call, self.q, self.k, self.v) | {"dout": dout}
        self.row_stats = dout  # set by preprocess

    def inputs(self, *results: Tensor) -> tuple[dict[str, Any], int]:
        """Scalars that every kernel takes, and the alignment: the unit of strides."""
        align = args.alignment([self.q, self.k, self.v, self.dout, *results])
        return {
            **args.shared_scalars(self.call, self.q, self.k, self.v, align),
            **strides("dout", self.dout, align),
            **args.row_stats_strides(self.row_stats),
        }, align

    def launch(
        self, kernel: Any, results: Pointers, programs: int, scalars: dict[str, Any], load: int | None = None
    ) -> None:
        """Launch a kernel that recomputes scores; `load` as for `formulas.device_function`."""
        pointers = {**self.pointers, **results}
        formulas.launch(self.recorder, self.call, kernel, pointers, programs, scalars, partial=load is None, load=load)

    def preprocess(self, out: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
        """Launch `preprocess_kernel`: two values a row, `[B, H, S, 2]` or `[H, T, 2]` with an even S or T."""
        *leading, total_q = lse.shape
        row_stats = self.recorder.new(lse.new_empty((*leading, total_q + total_q % 2, 2)))
        align = args.alignment([out, self.dout])
        tiles = -(-total_q // ROWS_AT_ONCE)
        pointers = {"out": out, "dout": self.dout, "lse": lse, "dlse": dlse, "row_stats": row_stats}
        programs = tiles * (lse.numel() // max(total_q, 1))
        scalars = {
            **strides("out", out, align),
            **strides("dout", self.dout, align),
            **lse_strides(lse),
            **dlse_strides(dlse),
            **args.row_stats_strides(row_stats),
            "DV": args.head_dim(out.shape[-1]),
            "num_tiles": tiles,
            "num_heads_q": out.shape[1],
            "total_q": total_q,
            "ALIGN": align,
            "BLOCK_M": ROWS_AT_ONCE,
            "num_warps": 4,
        }
        self.recorder.launch(PREPROCESS, pointers, programs, scalars)
        self.row_stats = row_stats
        self.pointers = {**self.pointers, "row_stats": Described(row_stats, Tensor.view, torch.int64)}

    def dkdv(self, config: KernelConfig) -> tuple[Tensor, Tensor]:
        """dk and dv, by position where keys are paged."""
        dk, dv = (self.recorder.new(new_key_rows(self.call, x)) for x in self.call.tensors[1:3])
        given, align = self.inputs(dk, dv)
        tiles = args.num_key_tiles(self.call, config.block_n)
        programs = tiles * args.num_heads_k(self.call) * args.dense_batch(dk)
        lists, list_strides = block_lists(self.recorder, self.call, config.block_m, config.block_n, of_keys=True)
        scalars = {
            **given,
            **list_strides,
            **strides("dk", dk, align, keys=True),
            **strides("dv", dv, align, keys=True),
            **args.constants(self.call, config, align),
            "num_tiles": tiles,
            "scale": self.call.settings.scale,
        }
        self.launch(DKDV, {"dk": dk, "dv": dv, **lists}, programs, scalars)
        return dk, dv

    def dq(self, config: KernelConfig, lse: Tensor, slopes: bool) -> tuple[Tensor, Tensor | None]:
        """dq, and each row's part of the gradient of its slope, shaped as lse."""
        q = self.call.tensors.q
        dq = args.new_result(self.recorder, self.call, new_rows(q, q.shape[1], q.shape[-1], q.dtype), 0)
        dslopes = args.new_result(self.recorder, self.call, torch.empty_like(lse), 0) if slopes else None
        given, align = self.inputs(dq)
        tiles = args.num_tiles(self.call, config.block_m)
        programs = tiles * dq.shape[1] * args.dense_batch(dq)
        lists, list_strides = block_lists(self.recorder, self.call, config.block_m, config.block_n)
        scalars = {
            **given,
            **list_strides,
            **strides("dq", dq, align),
            **args.row_strides("dslopes", dslopes),
            **args.constants(self.call, config, align),
            "num_tiles": tiles,
            "scale": self.call.settings.scale,
        }
        self.launch(DQ, {"dq": dq, "dslopes": dslopes, **lists}, programs, scalars)
        return dq, dslopes

    def dbias(self, config: KernelConfig) -> Tensor:
        """dbias, shaped as the bias: in its dtype where one program adds all of an element, else fp32."""
        bias = self.call.tensors.bias
        assert bias is not None
        tiles = args.dbias_scalars(self.call, bias, config)
        programs, splits = tiles.pop("programs"), tiles["splits"]
        dbias = self.recorder.op(partial(new_bias_gradients, splits, programs > 0), bias)
        given, align = self.inputs()
        constants = args.constants(self.call, config._replace(num_stages=1), align)
        scalars = {**given, **tiles, **constants, **args.dbias_strides(dbias), "num_tiles": None}
        self.launch(DBIAS, {"dbias": dbias}, programs, scalars)
        return self.recorder.op(sum_of_splits, dbias)

    def dcaptured(self, config: KernelConfig, needed: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of the tensors that a score_mod captures, fp32; a launch for each load of a tensor."""
        formula = score_formula(self.call)
        if formula is None or not any(needed):
            return [None] * len(needed)
        tensors = self.call.tensors.score_mod_tensors
        sums = [self.recorder.op(new_sums, x) if wanted else None for x, wanted in zip(tensors, needed, strict=True)]
        given, align = self.inputs()
        # Exact sums take sixty registers for each sixteen pairs of a thread.
        config = config._replace(block_m=min(config.block_m, 64), block_n=min(config.block_n, 32), num_stages=1)
        tiles = args.num_tiles(self.call, config.block_m)
        programs = tiles * self.q.shape[1] * args.dense_batch(self.q)
        constants = args.constants(self.call, config, align)
        for n, load in enumerate(loads(formula)):
            if needed[load.tensor]:
                inputs = formulas.function_of(self.call, formula, load=n).position_inputs
                by = {"BY_ROW": bool(inputs & {"score", "q_idx"}), "BY_KEY": bool(inputs & {"score", "k_idx"})}
                scalars = {**given, **constants, **by, "num_tiles": tiles}
                self.launch(DCAPTURED, {"sums": sums[load.tensor]}, programs, scalars, load=n)
        return [None if x is None else self.recorder.op(rounded_sums, tensors[n], x) for n, x in enumerate(sums)]


def new_bias_gradients(splits: int, written: bool, bias: Tensor) -> Tensor:
    """Gradients of a bias by split, `[splits, B, H, Sq, Sk]`; the kernel writes all elements, if it runs."""
    new = bias.new_empty if written else bias.new_zeros
    return new((splits, *bias.shape), dtype=bias.dtype if splits == 1 else torch.float32)


def sum_of_splits(gradients: Tensor) -> Tensor:
    return gradients[0] if len(gradients) == 1 else gradients.sum(dim=0)


def new_sums(x: Tensor) -> Tensor:
    """Exact sums, 0, for the elements of a tensor."""
    from .kernels.exact_sum import WORDS  # imports Triton

    return x.new_zeros((x.numel(), WORDS.value), dtype=torch.int64)


def rounded_sums(x: Tensor, sums: Tensor) -> Tensor:
    """The values of exact sums, fp32, shaped as `x`: rounded to 53 bits word by word, then once more."""
    from .kernels.exact_sum import LEAST_EXPONENT, NAN, NEGATIVE, POSITIVE, WORD_BITS  # imports Triton

    *words, special = sums.unbind(dim=1)
    total = words.pop().double()
    for word in reversed(words):
        total = total * 2.0**WORD_BITS.value + word
    total = total * 2.0**LEAST_EXPONENT.value
    for flag, value in ((POSITIVE, math.inf), (NEGATIVE, -math.inf), (NAN, math.nan)):
        total = torch.where((special & flag.value) > 0, total + value, total)
    return total.float().view(x.shape)


def from_row_stats(
    gradient: Callable[[RowStats], Tensor], sinks: Tensor | None, lse: Tensor, row_stats: Tensor, dlse: Tensor | None
) -> Tensor:
    """A gradient from lse and delta, which is the second of the kernels' statistics of a row."""
    return gradient(RowStats(sinks, lse, row_stats[..., : lse.shape[-1], 1], lse, dlse))


def slope_gradient(slopes: Tensor, cu_seqlens: Tensor | None, rows: Tensor) -> Tensor:
    """The gradient of slopes `[H]` or `[B, H]`: sums of the rows' parts, shaped as lse."""
    if slopes.dim() == 1:
        return sum_to_heads(rows)
    if cu_seqlens is None:
        return rows.sum(dim=-1)
    token = torch.arange(rows.shape[-1], device=rows.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)  # [T]; B for tokens of none
    total = rows.new_zeros((slopes.shape[0] + 1, slopes.shape[1]))
    return total.index_put_((sequence,), rows.t(), accumulate=True)[:-1]  # sorted, hence deterministic


def new_key_rows(call: Call, x: Tensor) -> Tensor:
    """Uninitialized gradients for k or v. Pages may be shared: their gradients are by position, `[B, H, S, D]`."""
    if call.layout == "dense":
        return new_rows(x, x.shape[1], x.shape[-1], x.dtype)
    if call.layout == "varlen":
        return x.new_empty(x.shape)
    assert call.tensors.page_table is not None
    batch, columns = call.tensors.page_table.shape
    return x.new_empty((batch, x.shape[2], columns * x.shape[1], x.shape[-1]))


def in_pages(pages: Tensor, table: Tensor, by_position: Tensor) -> Tensor:
    """Gradients of pages `[P, page_size, H, D]`: sums over all positions in each slot."""
    page_size = pages.shape[1]
    exists = (table >= 0) & (table < pages.shape[0])
    page = torch.where(exists, table.long(), pages.shape[0])  # [B, columns]; a spare page for invalid entries
    total = pages.new_zeros((pages.shape[0] + 1, *pages.shape[1:]), dtype=torch.float32)
    given = by_position.unflatten(2, (-1, page_size)).permute(0, 2, 3, 1, 4)  # [B, columns, page_size, H, D]
    return total.index_put_((page,), given.float(), accumulate=True)[:-1]  # sorted, hence deterministic
