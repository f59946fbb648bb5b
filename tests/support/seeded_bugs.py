"""Bugs planted in the tiled backend, to test that the contract's random calls notice each of them.

    python -m tests.support.seeded_bugs        # the table: each bug, and the first result and call that showed it

A bug is planted by compiling the changed source of a module and replacing the code objects of the functions that
changed, so that modules which imported them before run the changed code too.
"""

import functools
import importlib
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

try:
    from .checking import dense_case, features, lengths_on_the_device, tile_size
    from .mistakes import with_mistake
except ImportError:  # pytest imports the tests as modules of their own
    from checking import dense_case, features, lengths_on_the_device, tile_size
    from mistakes import with_mistake

from flashtile.errors import AttentionError
from flashtile.testing.case import Case
from flashtile.testing.generate import random_case
from flashtile.testing.oracle import Expected, solve
from flashtile.testing.tolerance import compare

NUM_RANDOM, NUM_ON_DEVICE, NUM_CACHED = 40, 12, 24
NUM_CALLS = len(features()) + NUM_RANDOM + NUM_ON_DEVICE + NUM_CACHED


class Bug(NamedTuple):
    name: str
    module: str  # below flashtile
    old: str
    new: str


SOFTCAP = """
        if self.softcap is not None:
            s = self.softcap * torch.tanh(s / self.softcap)"""
TERMS = """
        s = self.add_terms(s, tile)"""

BUGS = (
    # which pairs
    Bug(
        "window: left off by one",
        "backend.blockwise.masking",
        "rows + diagonal - window.left",
        "rows + diagonal - window.left + 1",
    ),
    Bug(
        "window: right off by one",
        "backend.blockwise.masking",
        "rows + diagonal + window.right",
        "rows + diagonal + window.right - 1",
    ),
    Bug(
        "causal aligned at the top left",
        "backend.blockwise.masking",
        "rows + diagonal + window.right",
        "rows + window.right",
    ),
    Bug(
        "top_left aligned at the bottom right", "backend.blockwise.masking", "keys <= rows)", "keys <= rows + diagonal)"
    ),
    Bug(
        "chunks of rows, not of positions",
        "backend.blockwise.masking",
        "(rows + diagonal) // window.chunk",
        "rows // window.chunk",
    ),
    Bug("chunk: a partly visible block taken for full", "call.window", "max(full_lo, last)", "max(full_lo, first)"),
    Bug("rows not in use computed", "backend.blockwise.tiles", "else tensors.seqused_q", "else None"),
    Bug(
        "visible blocks taken for full ones",
        "backend.tiled.loop",
        "full = visible.full_lo <= keys.start",
        "full = visible.lo <= keys.start",
    ),
    Bug(
        "last key block forgotten",
        "backend.tiled.loop",
        "range(first, visible.hi, shape.block_n)",
        "range(first, visible.hi - 1, shape.block_n)",
    ),
    Bug("mask ignored", "backend.blockwise.scores", "if self.mask is not None:", "if self.mask is not None and False:"),
    Bug(
        "mask function of the first head",
        "backend.blockwise.scores",
        "indices = (self.b, self.h[None], *self.positions(tile))",
        "indices = (self.b, 0 * self.h[None], *self.positions(tile))",
    ),
    Bug(
        "diagonal of varlen from the longest sequence",
        "backend.blockwise.tiles",
        "diagonal: int | Tensor = seqlen_k - seqlen_q",
        "diagonal = keys.max_length - queries.max_length",
    ),
    Bug("seqused_k ignored", "backend.blockwise.tiles", "torch.minimum(used, length)", "length"),
    Bug(
        "page off by one",
        "backend.blockwise.tiles",
        "column = position // self.page_size",
        "column = (position + 1) // self.page_size % self.page_table.shape[1]",
    ),
    Bug(
        "keys past the end exist",
        "backend.blockwise.tiles",
        "(position < self.length[:, None]) & (page >= 0)",
        "(page >= 0)",
    ),
    Bug("shared pages overwrite one another", "backend.blockwise.tiles", "accumulate=True", "accumulate=False"),
    Bug(
        "heads of a group interleaved",
        "backend.blockwise.tiles",
        "x.unflatten(1, (-1, num_groups)).flatten(2, 3)",
        "x.unflatten(1, (num_groups, -1)).transpose(1, 2).flatten(2, 3)",
    ),
    # what a score becomes
    Bug(
        "ALiBi distance without absolute value",
        "backend.blockwise.scores",
        "(rows + self.slab.diagonal - keys).abs()",
        "(rows + self.slab.diagonal - keys)",
    ),
    Bug("ALiBi added", "backend.blockwise.scores", "s = s - self.slopes", "s = s + self.slopes"),
    Bug("softcap after bias", "backend.blockwise.scores", SOFTCAP + TERMS, TERMS + SOFTCAP),
    Bug(
        "softcap without derivative", "backend.blockwise.score_gradients", "if scores.softcap is not None:", "if False:"
    ),
    Bug(
        "dbias not reduced but overwritten",
        "backend.blockwise.score_gradients",
        "gradients.bias.add(ds.sum_to_size(shape), lambda x: tile_part(slab_part(x, slab), tile))",
        "tile_part(slab_part(gradients.bias.recent, slab), tile).copy_(ds.sum_to_size(shape))",
    ),
    Bug("dslopes with the wrong sign", "backend.blockwise.score_gradients", "add(-dslopes", "add(dslopes"),
    Bug(
        "score_mod without derivative",
        "backend.blockwise.score_gradients",
        "torch.where(visible, dscore, 0)",
        "torch.where(visible, ds, 0)",
    ),
    Bug(
        "score_mod gradients of the last tile alone",
        "backend.blockwise.score_gradients",
        "total.add(dtensor)",
        "total.recent.copy_(dtensor)",
    ),
    # how rows are normalized
    Bug("acc not rescaled", "backend.tiled.forward", "state.acc * alpha + pv", "state.acc + pv"),
    Bug("l not rescaled", "backend.tiled.forward", "state.l * alpha + l", "state.l + l"),
    Bug(
        "dropout before l",
        "backend.tiled.forward",
        "l = p.sum(dim=-1, keepdim=True)",
        "l = (p if keep is None else p * keep).sum(dim=-1, keepdim=True)",
    ),
    Bug("sink not in l", "backend.blockwise.softmax", "torch.exp(shifted)", "torch.zeros_like(sink)"),
    Bug("NaN in rows that see nothing", "backend.blockwise.softmax", "torch.where(m == -torch.inf, 0.0, m)", "m"),
    Bug("lse without the maximum", "backend.blockwise.softmax", "state.m + torch.log(l)", "torch.log(l)"),
    Bug(
        "dropout counter without the sequence",
        "backend.blockwise.scores",
        "self.b * self.num_heads + self.h",
        "0 * self.b + self.h",
    ),
    Bug(
        "halves of the random words swapped",
        "backend.blockwise.rng",
        "(words & 0xFFFF, words >> 16)",
        "(words >> 16, words & 0xFFFF)",
    ),
    Bug(
        "kept probabilities not scaled up",
        "backend.blockwise.rng",
        "return kept.to(dtype) * ",
        "return kept.to(dtype) + 0 * ",
    ),
    Bug(
        "scores rounded to bf16",
        "backend.tiled.forward",
        "s = scores.forward(s, tile, visible)",
        "s = scores.forward(s, tile, visible).bfloat16().to(s.dtype)",
    ),
    # backward
    Bug("delta without dlse", "backend.tiled.backward", "if dlse is not None:", "if False:"),
    Bug("delta added", "backend.tiled.backward", "ds = p * (dp - delta)", "ds = p * (dp + delta)"),
    Bug("dropout not in dp", "backend.tiled.backward", "dp = dp * keep", "dp = dp * 1"),
    Bug("dropout not in dv", "backend.tiled.backward", "kept = p if keep is None else p * keep", "kept = p"),
    Bug(
        "scale missing in dq",
        "backend.tiled.backward",
        "unfold_groups(dq_i.result() * settings.scale, groups)",
        "unfold_groups(dq_i.result(), groups)",
    ),
    Bug(
        "scale twice in dk",
        "backend.tiled.backward",
        "chunked_matmul(ds.transpose(-1, -2), q_i)",
        "chunked_matmul(ds.transpose(-1, -2), q_i * settings.scale)",
    ),
    Bug(
        "sink gradient with the wrong sign",
        "backend.tiled.backward",
        "features.sinks.add(-part",
        "features.sinks.add(part",
    ),
    Bug("hidden pairs have gradients", "backend.tiled.backward", "p.masked_fill_(~visible, 0)", "pass"),
    # KV cache
    Bug("keys appended one slot late", "call.cache", "+ tokens.place  # [T]", "+ tokens.place + 1  # [T]"),
    Bug("appended keys not seen", "call.cache", "total = total.long() + appended(cache, features)", "total = total"),
    Bug("cache_batch_idx ignored", "call.cache", "if rows is None else rows[", "if True else rows["),
    Bug("leftpad ignored", "call.cache", "leftpad_k=cache.leftpad_k", "leftpad_k=None"),
    Bug(
        "values in another order",
        "call.cache",
        "tokens_of(cache.v), tokens, position",
        "tokens_of(cache.v).flip(0), tokens, position",
    ),
    Bug("page of a new key off by one", "call.cache", "page_size\n    page =", "page_size + 1\n    page ="),
    Bug("tokens of no sequence appended", "call.cache", "fits = tokens.exists & (column", "fits = (column"),
    Bug("new tokens of wrong sequences", "call.cache", "token, right=True)", "token, right=False)"),
    Bug(
        "another slot written too",
        "call.cache",
        "for cache, new, descale, writes in",
        "pages.v[0, 0] = 0\n    for cache, new, descale, writes in",
    ),
    Bug("scales of new tokens not written", "call.cache", "write(descale[0], scale)", "pass"),
    Bug(
        "scales ignored", "backend.blockwise.eight_bit", "return tile * scale.transpose(1, 2)[..., None]", "return tile"
    ),
    Bug(
        "scales of the next slot",
        "call.eight_bit",
        "return descale[tuple(index)]",
        "return descale[tuple(index)].roll(1, 0)",
    ),
    Bug(
        "rotary: the other way",
        "call.cache",
        "(a * cos - b * sin, a * sin + b * cos)",
        "(a * cos + b * sin, b * cos - a * sin)",
    ),
    Bug("rotary: conventions swapped", "call.cache", "if rotary.interleaved else turning", "if False else turning"),
    Bug("rotary: keys not turned", "call.cache", "k = rotated(cache.k, turn, cache, rotary)", "k = cache.k"),
    Bug(
        "rotary: keys as if the cache were empty",
        "call.cache",
        "k = rotated(cache.k, turn",
        "k = rotated(cache.k, tokens.place",
    ),
    Bug("rotary: queries not the last tokens", "call.cache", "- count(t.q, t.cu_seqlens_q)", "- appended(cache, t)"),
    Bug("rotary: queries from another start", "call.cache", "first = cache.rotary_start", "first = None"),
    Bug("rotary: fixed queries advance", "call.cache", "if rotary.q_fixed else", "if False else"),
    Bug(
        "new keys packed like the queries",
        "call.cache_tensors",
        "features.cu_seqlens_q if cache.cu_seqlens_k_new is None else",
        "features.cu_seqlens_q if features.cu_seqlens_q is not None else",
    ),
    Bug("rows of a page table in order", "call.cache", "rows_of_table(table, rows)", "table[: len(rows)]"),
    Bug("rotary: the whole head dimension", "call.cache", "tokens[..., 2 * half :]", "tokens[..., 2 * half :] * 1.1"),
    Bug("rotary: in the input dtype", "call.cache", "(table[position].to(dtype)", "(table[position].to(x.dtype)"),
)


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    module = importlib.import_module(f"flashtile.{bug.module}")
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    changed = dict(codes(compile(with_mistake(source, bug.name, bug.old, bug.new), module.__file__, "exec")))
    # Dynamo leaves functions of its own in a module that it has compiled: the source does not define them.
    own = [f for f in functions(module) if f.__qualname__ in changed]
    originals = {f: f.__code__ for f in own if f.__code__ != changed[f.__qualname__]}
    assert originals, f"{bug.name}: no function has changed"
    try:
        for function in originals:
            function.__code__ = changed[function.__qualname__]
        yield
    finally:
        for function, code in originals.items():
            function.__code__ = code


def codes(code: types.CodeType) -> Iterator[tuple[str, types.CodeType]]:
    """All functions in compiled source, methods included, by qualified name."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant.co_qualname, constant
            yield from codes(constant)


def functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """The functions and methods that a module defines."""
    for owner in (
        module,
        *(x for _, x in inspect.getmembers(module, inspect.isclass) if x.__module__ == module.__name__),
    ):
        for value in vars(owner).values():
            if isinstance(value, types.FunctionType) and value.__code__.co_filename == module.__file__:
                yield value


class Call(NamedTuple):
    """A call on which every bug is tried, and its tile size."""

    case: Case
    expected: dict[str, Expected]
    block: int
    on_device: bool = False  # simulates lengths and pages on a GPU


@functools.cache
def call(n: int) -> Call:
    """Call number `n`: every feature alone, random calls, random packed calls whose lengths the host does not read, and
    calls with a KV cache, whose lengths it reads in every other one.
    """
    small = list(features().values())
    if n < len(small):
        case = dense_case(**small[n])
        return Call(case, solve(case), block=4)
    n -= len(small)
    cached = n >= NUM_RANDOM + NUM_ON_DEVICE
    on_device = n >= NUM_RANDOM and (not cached or n % 2 == 1)
    function = "attention_with_kvcache" if cached else "attention_varlen" if on_device else None
    case = random_case(n, function=function)
    return Call(case, solve(case), block=32, on_device=on_device)


def caught_by(num_calls: int = NUM_CALLS, module: str = "") -> str | None:
    """Describe the first wrong result of the fixed calls; `None` if all are right. For a module of the cache, those
    with one come first.
    """
    numbers = range(num_calls)
    if module.startswith("call.cache") or module.endswith("eight_bit"):
        numbers = [*range(NUM_CALLS - NUM_CACHED, NUM_CALLS), *range(NUM_CALLS - NUM_CACHED)]
    for n in numbers:
        case, expected, block, on_device = call(n)
        place = lengths_on_the_device() if on_device else nullcontext()
        with place, tile_size(block, block, scores=4 * block**2):
            try:
                worst = compare(case.run("tiled"), case, expected)[0]
            except (RuntimeError, IndexError, AttentionError) as error:  # a bug may also break shapes
                return f"{type(error).__name__} in call {n}: {case.description}"
        if not worst.ok:
            return f"{worst.name} of call {n} ({worst.ratio:.3g} of the bound): {case.description}"
    return None


def main() -> None:
    print(f"{'no bug':46} {caught_by() or 'all results are right'}")
    for bug in BUGS:
        with planted(bug):
            print(f"{bug.name:46} {caught_by(module=bug.module) or 'NOT CAUGHT'}", flush=True)


if __name__ == "__main__":
    main()
