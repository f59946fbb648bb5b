"""What each backend takes, and what `auto` takes on each chip, for docs/make_tables.py: the backends' own answers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from cells import markdown

from flashtile.call.call import DESCRIBED, DIFFERENTIABLE, FEATURES, Features, Needs
from flashtile.call.device import Device
from flashtile.call.eight_bit import QUERIES, EightBit
from flashtile.call.problem import Pages, Problem
from flashtile.call.window import Window
from flashtile.dispatch.planner import AUTO, SUPPORT, declines_on_device, fastest
from flashtile.expression.formula import Formula
from flashtile.expression.program import Instruction, Program

BACKENDS = ("reference", "tiled", "cpu", "triton", "hopper")
CPU = Device("cpu", "a CPU", "x86_64", 8)
H200 = Device("cuda", "NVIDIA H200", "sm_90", 132)
CHIPS = {  # NVIDIA's and AMD's names, architectures and numbers of processors
    "H100, H200": H200,
    "A100": Device("cuda", "NVIDIA A100", "sm_80", 108),
    "RTX 4090": Device("cuda", "NVIDIA GeForce RTX 4090", "sm_89", 128),
    "B200": Device("cuda", "NVIDIA B200", "sm_100", 148),
    "RTX 5090": Device("cuda", "NVIDIA GeForce RTX 5090", "sm_120", 170),
    "MI300": Device("cuda", "AMD Instinct MI300X", "gfx942", 304),
    "CPU": CPU,
    "other": Device("mps", "mps", "mps", 1),
}


class Row(NamedTuple):
    """A problem with one feature, and whether it has gradients."""

    problem: Problem
    needs: Needs | None


def of_one(op: str, kind: str, value: str) -> Formula:
    """A function of one operation."""
    return Formula(Program((Instruction(op, kind, (), value),), (0,)), ())


def plain() -> Problem:
    none: dict[str, Any] = dict.fromkeys(("pages", "score_mod", "mask_mod"))
    flags = ("softcap", "dropout", "deterministic", "seqused_q", "leftpad_k")
    none |= dict.fromkeys(flags, False) | {"features": Features()}
    return Problem(
        "dense", torch.bfloat16, 2, 8, 8, 4096, 4096, 128, 128, window=Window(None, None), alignment=16, **none
    )


def features() -> Iterator[tuple[str, Row]]:
    """Each feature with a problem that has it alone."""
    base = plain()
    in_pages: dict[str, Any] = {"layout": "paged", "pages": Pages(64, True, True)}
    pairs = (True, True, False, False)  # of a batch and its heads, the same
    present = {name: pairs if FEATURES[name].broadcasts else True for name in DESCRIBED}
    gradients = Needs(True, True, True)

    def row(gradient: str | None = None, **changes: Any) -> Row:
        return Row(replace(base, **changes), gradients._replace(**{gradient: True} if gradient else {}))

    def forward(**changes: Any) -> Row:
        return Row(replace(base, **changes), None)

    yield "bfloat16, float16", row()
    yield "float32", row(dtype=torch.float32)
    yield "float64", row(dtype=torch.float64)
    for width in (64, 80):
        yield f"head dimension {width}", row(head_dim=width, head_dim_v=width)
    yield "head dimension 192 with values of 128", row(head_dim=192)
    for width in (512, 1024):
        yield f"head dimension {width}", row(head_dim=width, head_dim_v=width)
    latent: dict[str, Any] = {"num_heads_kv": 1, "head_dim": 576, "head_dim_v": 512, "latent": True}
    yield "head dimension 576 with `v_dim` 512", row(layout="varlen", **latent)
    yield "the same in a cache", row(**latent, **in_pages)
    yield "the same of 8 bits", forward(eight_bit=EightBit("e4m3", False, False), **latent, **in_pages)
    yield "grouped heads", row(num_heads_kv=2)
    yield "causal", row(window=Window(None, 0))
    yield "sliding window", row(window=Window(1023, 0))
    yield "window of earlier keys", row(window=Window(1023, -1))
    yield "`attention_chunk`", row(window=Window(None, 0, chunk=1024))
    yield "`softcap`", row(softcap=True)
    for name, value in present.items():
        own = name if name in DIFFERENTIABLE else None
        yield f"`{name}`", row(own, features=Features(**{name: value}))
    yield "`mask`, a function", row(mask_mod=of_one("constant", "bool", "True"))
    yield "`score_mod`", row(score_mod=of_one("input", "real", "score"))
    yield "`dropout_p`", row(dropout=True)
    yield "`deterministic`", row(deterministic=True)
    yield "`batch_invariant`", forward(batch_invariant=True)  # gradients have the plans of other calls
    yield "`batch_invariant`, decoding", forward(batch_invariant=True, seqlen_q=1)
    yield "packed sequences", row(layout="varlen")
    yield "`seqused_q`", row(layout="varlen", seqused_q=True)
    yield "pages", row(**in_pages)
    eight_bit = EightBit("e4m3", True, True)
    yield "keys and values of 8 bits", forward(eight_bit=eight_bit)
    yield "the same in pages", forward(eight_bit=eight_bit, **in_pages)
    queries: dict[str, Any] = {"dtype": QUERIES, "out_dtype": torch.bfloat16}
    yield "queries of 8 bits too", forward(eight_bit=eight_bit._replace(q_by_row=False), **queries)
    yield "the same with scales of heads", forward(eight_bit=EightBit("e4m3", False, False, False), **queries)


def backends() -> str:
    """Each feature in each backend, as its `support` module answers for a problem with that feature."""

    def answer(name: str, row: Row) -> str:
        device = CPU if name == "cpu" else H200
        if declines_on_device(name, row.problem, device, None) is not None:
            return "no"
        backward = row.needs is not None and declines_on_device(name, row.problem, device, row.needs) is None
        return "yes" if backward else "forward"

    body = [[name, *(answer(backend, row) for backend in BACKENDS)] for name, row in features()]
    for name, way in (("forward mode", "tangent_candidates"), ("second derivatives", "second_candidates")):
        body.append([name, *("yes" if hasattr(SUPPORT[x], way) else "no" for x in BACKENDS)])
    return markdown(["feature", *(f"`{name}`" for name in BACKENDS)], body)


def by_chip() -> str:
    """The backends that `auto` takes for each feature on each chip: of forward, and of backward where it is another."""

    def taken(problem: Problem, device: Device, needs: Needs | None, moves: Needs | None = None) -> str:
        def declines(name: str, needs: Needs | None) -> str | None:
            return declines_on_device(name, problem, device, needs, moves)

        chosen, _ = fastest(AUTO, declines, problem, device, needs, moves)
        if chosen is None:
            return "none"
        rest = chosen.rest
        return f"`{chosen.backend}`" if rest is None else f"`{chosen.backend}` and `{rest.plan.backend}`"

    def answer(row: Row, device: Device) -> str:
        forward = taken(row.problem, device, None)
        if row.needs is None:
            return forward
        backward = taken(row.problem, device, row.needs)
        return forward if backward == forward else f"{forward}, {backward}"

    body = [[name, *(answer(row, device) for device in CHIPS.values())] for name, row in features()]
    rows = Needs(True, True, True)
    body.append(["forward mode", *(taken(plain(), device, None, rows) for device in CHIPS.values())])
    body.append(["second derivatives", *(taken(plain(), device, rows, rows) for device in CHIPS.values())])
    return markdown(["feature", *CHIPS], body)


TABLES = {"backends": backends, "by_chip": by_chip}
