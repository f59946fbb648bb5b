"""Bugs in the generators of the CPU kernels, each with a random call whose results must show it.

    python -m tests.support.seeded_cpu_bugs        # the table: each bug, and the wrong result

Bugs are planted as in `seeded_bugs`, and the kernels of each are compiled anew, without the caches in memory and on
disk. One call for each bug keeps that to a few seconds.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

try:
    from .checking import dense_case, offsets
    from .seeded_bugs import Bug, planted
except ImportError:  # pytest imports the tests as modules of their own
    from checking import dense_case, offsets
    from seeded_bugs import Bug, planted

import flashtile
from flashtile.backend.cpu import archive, jit, machine_code, targets
from flashtile.backend.cpu.targets import VECTORS_VARIABLE
from flashtile.dispatch import fast_path
from flashtile.testing.case import Case, MaskFunction, ScoreFunction
from flashtile.testing.mask_functions import causal_by_head
from flashtile.testing.moving import moving
from flashtile.testing.oracle import Expected, solve
from flashtile.testing.score_functions import tempered_table
from flashtile.testing.tolerance import compare

Check = Callable[[], str | None]  # the worst result of a call, if it is out of bounds


class CpuBug(NamedTuple):
    """A bug, the check that must notice it, and the vectors that its kernels need."""

    bug: Bug
    check: Check
    width: str | None = None

    @property
    def is_usable(self) -> bool:
        return self.width is None or self.width in targets.usable_widths()

    def run(self) -> str | None:
        with mock.patch.dict(os.environ, {} if self.width is None else {VECTORS_VARIABLE: self.width}):
            return self.check()


def forward_case(**keywords: Any) -> Case:
    return dense_case(forward_only=True, **keywords)


def paged_case() -> Case:
    """Pages of four keys, one of them shared by two sequences."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((9, 4, 8), (5, 4, 2, 8), (5, 4, 2, 8)))
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets(4, 5), "cu_seqlens_k": None}
    arguments["page_table"] = torch.tensor([[0, 3, 1], [3, 4, 0]], dtype=torch.int32)
    arguments["causal"], arguments["seqused_k"] = True, torch.tensor([11, 7], dtype=torch.int32)
    return Case("attention_varlen", arguments, forward_only=True)


def mask_case() -> Case:
    """A bool mask and a causal window, so that a block is at the window's edge."""
    mask = torch.rand((2, 1, 7, 9), generator=torch.Generator().manual_seed(0)) < 0.7
    return dense_case(mask=mask, causal=True, forward_only=True)


def bias_case() -> Case:
    """A bias that sequences and heads share."""
    return dense_case(bias=torch.randn((1, 1, 7, 9), generator=torch.Generator().manual_seed(0)))


@functools.cache
def solved(make: Callable[[], Case]) -> tuple[Case, Expected]:
    case = make()
    return case, solve(case)


def wrong_result(make: Callable[[], Case]) -> str | None:
    """Compare a call with the oracle."""
    case, expected = solved(make)
    worst = compare(case.run("cpu"), case, expected)[0]
    return None if worst.ok else f"{worst.name} ({worst.ratio:.3g} of the bound): {case.description}"


def wrong_long_sum() -> str | None:
    """Compare dv, the sum of 2**20 equal terms, with its exact value. The oracle would take seconds."""
    q, k, v = torch.zeros(1, 1, 2**20, 1), torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1).requires_grad_()
    out = flashtile.attention(q, k, v, backend="cpu")
    (dv,) = torch.autograd.grad(out, v, torch.full_like(out, 0.7))
    error = (dv.double() / (2**19 * torch.tensor(0.7).double()) - 1).abs().max().item() / 2**-23
    bound = 4 + 32  # the contract's, in units of eps, where all terms have one sign
    return None if error <= bound else f"dv ({error / bound:.3g} of the bound): sum over 2**20 rows"


def call(make: Callable[..., Case], *names: str, **keywords: Any) -> Check:
    """The check of the call `make(*names, **keywords)`."""
    return functools.partial(wrong_result, functools.partial(make, *names, **keywords))


def narrow_panel_case() -> Case:
    """Rows that fill one vector, whatever its width, and one row more."""
    return forward_case(num_heads_kv=2, seqlen_q=targets.host().vector_bytes // 4 + 1)


def score_mod_case() -> Case:
    """A factor for each head, and a table of distances, which groups of heads share a key head for."""
    score_mod = ScoreFunction(
        tempered_table,
        (torch.tensor([0.7, 1.2, 1.0, 1.5]), torch.randn((4, 17), generator=torch.Generator().manual_seed(0))),
    )
    return dense_case(num_heads_q=4, num_heads_kv=2, seqlen_q=20, seqlen_k=30, score_mod=score_mod)


def moving_case(*names: str, **keywords: Any) -> Case:
    return moving(dense_case(**keywords), names or None)


HEADS = call(forward_case, num_heads_q=4, num_heads_kv=2)
BLOCKS = call(forward_case, seqlen_k=97)  # the second block has one key
RISING = call(forward_case, seqlen_k=300, scale=3.0)  # several blocks, and maxima that differ by more than 1
DECODE = call(forward_case, batch=1, num_heads_q=2, seqlen_q=1, seqlen_k=2000, head_dim=32)  # split over keys
TILES = call(forward_case, seqlen_q=20, seqlen_k=300, head_dim=32, dtype=torch.bfloat16, scale=1.0, window=(70, 9))
GRADIENTS = call(dense_case)
SCORE_MOD = call(score_mod_case)
TANGENTS = call(moving_case, seqlen_k=300, scale=3.0, dropout_p=0.3, dropout_seed=5)

CPU_BUGS = (
    CpuBug(
        Bug(
            "window: left off by one",
            "kernels.tiles",
            'diagonal_key - a.integer("window_left")',
            'diagonal_key - a.integer("window_left") + 1',
        ),
        call(forward_case, window=(3, 2)),
    ),
    CpuBug(
        Bug("chunk one key longer", "kernels.tiles", '"attention_chunk") - 1)', '"attention_chunk"))'),
        call(forward_case, attention_chunk=4),
    ),
    CpuBug(
        Bug("chunk before all keys forgotten", "kernels.tiles", "0 - chunk, position", "0 * chunk, position"),
        call(forward_case, attention_chunk=4, seqlen_q=9, seqlen_k=7),
    ),
    CpuBug(
        Bug(
            "mask ignored at the edge of a window",
            "kernels.forward",
            "if variant.mask:",
            "if variant.mask and not edge:",
        ),
        call(mask_case),
    ),
    CpuBug(
        Bug(
            "heads of a group interleaved",
            "kernels.tiles",
            "task.kv_head * groups + row % groups",
            'task.kv_head + row % groups * a.integer("num_heads_kv")',
        ),
        HEADS,
    ),
    CpuBug(
        Bug(
            "last key block forgotten",
            "kernels.forward",
            "hi.get(), BLOCK_N) as block",
            "hi.get() - 1, BLOCK_N) as block",
        ),
        BLOCKS,
    ),
    CpuBug(
        Bug(
            "page off by one",
            "kernels.keys",
            "+ j // page_size]",
            '+ (j + 1) // page_size % a.integer("page_columns")]',
        ),
        call(paged_case),
    ),
    CpuBug(
        Bug("acc not rescaled", "kernels.products", "code.multiply_add(x, a, y.get())", "x + y.get()"),
        RISING,
    ),
    CpuBug(
        Bug("sink not in l", "kernels.softmax", "code.select(sink.equals(-math.inf), code.real(0), 1)", "code.real(0)"),
        call(forward_case, sinks=torch.tensor([1.0, -0.5])),
    ),
    CpuBug(
        Bug("halves of the random words swapped", "kernels.rng", "16 * (e % 2)", "16 * (1 - e % 2)"),
        call(forward_case, dropout_p=0.3, dropout_seed=5),
    ),
    CpuBug(
        Bug("error of a carry forgotten", "kernels.sums", "error = recent - (new - total)", "error = recent * 0.0"),
        wrong_long_sum,
    ),
    CpuBug(
        Bug(
            "splits combined without weights",
            "kernels.combine",
            "exp2(code, difference * LOG2E)",
            "code.full(1.0)",
        ),
        DECODE,
    ),
    CpuBug(
        Bug(
            "decode: last keys of a vector",
            "kernels.decode",
            "code.minimum(j + n, count - 1)",
            "code.minimum(j + n, count - 2)",
        ),
        DECODE,
    ),
    CpuBug(
        Bug("tiles: first key inside of a tile", "kernels.tile_forward", "lowest // TILE_DEPTH * TILE_DEPTH", "lowest"),
        TILES,
        "amx-emulated",
    ),
    CpuBug(
        Bug(
            "tiles: acc not rescaled",
            "kernels.tile_forward",
            "code.multiply_add(o_d.vector(), factor,",
            "(o_d.vector() +",
        ),
        TILES,
        "amx-emulated",
    ),
    CpuBug(
        Bug("delta added", "kernels.backward", "ds = p * (dp - delta)", "ds = p * (dp + delta)"),
        GRADIENTS,
    ),
    CpuBug(
        Bug(
            "scale missing in dq and dk",
            "kernels.backward",
            "product_gradient(final, ds) * scale",
            "product_gradient(final, ds)",
        ),
        GRADIENTS,
    ),
    CpuBug(
        Bug(
            "dk added twice",
            "kernels.backward",
            '        self.call("add_key_gradient", first, count, w.dscores,',
            '        self.call("add_key_gradient", first, count, w.dscores, w.q_rows, depth, name="dk")\n'
            '        self.call("add_key_gradient", first, count, w.dscores,',
        ),
        GRADIENTS,
    ),
    CpuBug(
        Bug("mask function ignored in backward", "kernels.backward", "visible = final.visible", "visible = None"),
        call(dense_case, num_heads_q=4, mask=MaskFunction(causal_by_head)),
    ),
    CpuBug(
        Bug("derivative of the score_mod forgotten", "kernels.backward", "ds * final.formula[1]", "ds"),
        SCORE_MOD,
    ),
    CpuBug(
        Bug(
            "score_mod: head of the group",
            "kernels.tiles",
            'w.head[at] = code.convert(h + a.integer("h0"), INT)',
            'w.head[at] = code.convert(h % a.integer("groups"), INT)',
        ),
        SCORE_MOD,
    ),
    CpuBug(
        Bug(
            "score_mod: run ended without its elements",
            "kernels.dcaptured",
            "                self.end(load, run)\n                run.element",
            "                run.element",
        ),
        SCORE_MOD,
    ),
    CpuBug(
        Bug(
            "last row of a narrow panel",
            "kernels.kernel",
            "(num_valid <= panel.vectors",
            "(num_valid - 1 <= panel.vectors",
        ),
        call(narrow_panel_case),
    ),
    CpuBug(
        Bug("dbias overwritten", "kernels.dbias", "dbias[at] = dbias[at] + x", "dbias[at] = x"),
        call(bias_case),
    ),
    CpuBug(
        Bug(
            "tangents: dl not rescaled",
            "kernels.tangents",
            "code.multiply_add(dl.vector(), w.alpha.vector(column), total.get())",
            "dl.vector() + total.get()",
        ),
        TANGENTS,
    ),
    CpuBug(
        Bug("tangents: lse forgotten", "kernels.tangents", " - of_rows(of_panel) * w.out.vector(at), at)", ", at)"),
        TANGENTS,
    ),
    CpuBug(
        Bug("tangents: p ds not dropped", "kernels.tangents", "(w.scores, w.dscores) if", "(w.scores,) if"),
        TANGENTS,
    ),
    CpuBug(
        Bug(
            "tangents: products overwrite each other",
            "kernels.products",
            "several = code.constant(1, BIT) if adds",
            "several = code.constant(0, BIT) if adds",
        ),
        TANGENTS,
    ),
    CpuBug(
        Bug("tangents: sink forgotten", "kernels.tangents", 'if "sinks" in tangents:', "if False:"),
        call(moving_case, "q", "sinks", sinks=torch.tensor([1.0, -0.5])),
    ),
    CpuBug(
        Bug("tangents: derivative of the softcap", "kernels.scores", "ds * ((1.0 - tanh_s * tanh_s) *", "ds * (1.0 *"),
        call(moving_case, "q", softcap=1.5),
    ),
    CpuBug(
        Bug("tangents: carry without its factor", "kernels.tangents", "last, w.alpha.vector(column))", "last)"),
        call(moving_case, "q", batch=1, seqlen_q=3, seqlen_k=3300, scale=1.0, seed=1),
    ),
)


@contextmanager
def fresh_kernels() -> Iterator[None]:
    """Compile every kernel of this block, with no cache in memory or on disk, before or after."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(archive, "find", return_value=None))
        patches.enter_context(mock.patch.object(jit, "read_object", return_value=None))
        patches.enter_context(mock.patch.object(jit, "write_object"))
        forget_kernels()
        try:
            yield
        finally:
            forget_kernels()


def forget_kernels() -> None:
    fast_path.forget()
    jit._PARTS.clear()
    machine_code.loaded.cache_clear()


def caught(x: CpuBug) -> str | None:
    with planted(x.bug._replace(module=f"backend.cpu.{x.bug.module}")), fresh_kernels():
        return x.run()


def main() -> None:
    for x in CPU_BUGS:
        print(f"{x.bug.name:40} {caught(x) or 'NOT CAUGHT'}; without it: {x.run() or 'right'}", flush=True)


if __name__ == "__main__":
    main()
