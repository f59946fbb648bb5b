"""The SASS of Hopper's kernels, without a GPU.

`pytest -m sass` compiles all kernels and examines the order of their instructions; by default, one problem for each
kernel is compiled.
"""

import functools
import re
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

from forced import first
from hopper_variants import BIAS_TILES, FEW, FLOAT32, LONG, SHORT, VARIANTS, call_of_family
from offline.compiled import Compiled, compile_launch
from offline.launches import Launch, hopper_launches_of

from flashtile.backend.hopper import support
from flashtile.backend.hopper.plan import candidates

pytestmark = pytest.mark.skipif(support.unsupported() is not None, reason=f"{support.unsupported()}")
SHARED_MEMORY = 227 * 1024
CHOSEN = (  # and the number of warpgroups
    ("full", 64, LONG, 3), ("causal", 64, LONG, 3), ("sinks", 128, SHORT, 2), ("packed everything 64", 64, SHORT, 2),
    ("causal", 96, SHORT, 2), ("causal", 96, LONG, 3), ("packed 256", 256, SHORT, 2),
    ("causal", 80, SHORT, 2), ("full", 80, LONG, 3), ("causal", 160, SHORT, 2), ("full", 64, FEW, 1),
    ("full", 128, FEW, 2), (BIAS_TILES, 32, SHORT, 1), ("packed 64", 64, SHORT, 1),
)  # fmt: skip
BACKWARD = (("packed 64", 64, SHORT), ("causal", 80, SHORT), ("packed 96", 96, SHORT), ("packed 128", 128, SHORT))
LATE_DQ = (("full", 64, 512), ("full", 96, 8192), ("causal", 64, 2048), ("causal", 80, 2048), ("causal", 96, 2048))
SPLIT_BACKWARD = (
    ("causal", (192, 128), SHORT), ("causal", 160, SHORT), ("full", 192, SHORT), ("packed 256", 256, SHORT),
)  # fmt: skip
IN_REGISTERS = [("full", 192, SHORT)] if (support.triton_version() or (0, 0)) <= candidates.NEWEST_LATE_DQ else []
BACKWARD_SPILL, FORWARD_SPILL = 150, 4  # most bytes of a thread
# Outside of inner loops, where `test_overlap_of_forward` accepts none.
MORE_FORWARD_SPILL = {
    ("packed everything 64", 64, SHORT, 2): 8, ("causal", 96, LONG, 3): 16, ("packed 256", 256, SHORT, 2): 8,
    ("causal", 160, SHORT, 2): 16,
}  # fmt: skip
SPLIT_BACKWARD_SPILL = {("causal", 160, SHORT): 4}  # others: 0
# Measured, with Triton 3.6 and with 3.9: mostly numbers of the tile (docs/design/hopper-float32.md).
FLOAT32_SPILL = {"float32_forward": (320, 850), "dq": (64, 200), "dkdv": (32, 500)}
FORWARD_KERNELS = ("forward", "wide_forward")
WIDE_SPILL = 480  # of addresses, a few of which a step loads
WIDE_DQ_SPILL = 760  # of addresses too, some 25 of which a step loads
NEWER_TRITON_SPILL = 32  # most bytes of a thread in forward
NEWER_TRITON_SPLIT_SPILL, NEWER_TRITON_LOADS = 16, 1  # in dq and dkdv; of spilled numbers in a step of forward
SPILLS_3WG = (support.triton_version() or (0, 0)) > candidates.NEWEST_3WG  # above 64 features: two instead
ONE_OF_EACH = (  # problem, kernel, most spilled bytes of a thread
    (("full", 64, SHORT, 1), "forward", NEWER_TRITON_SPILL), (("full", 64, SHORT), "backward", BACKWARD_SPILL),
    (("full", (192, 128), SHORT), "dq", 0), (("full", (192, 128), SHORT), "dkdv", 0),
    (("float32 causal 128", 128, SHORT), "float32_forward", FLOAT32_SPILL["float32_forward"][1]),
)  # fmt: skip


def launch_of(family: tuple, name: str) -> Launch:
    """A launch of a family's call: by two warpgroups, or their number in the family; by kernels of more registers."""

    warpgroups = family[3] if family[3:] else 2
    if warpgroups == 3 and family[1] > 64 and SPILLS_3WG:
        warpgroups = 2

    def fits(config: Any) -> bool:
        if name in FORWARD_KERNELS:
            return config.num_warpgroups == warpgroups
        if config.kind == "split":
            return config.dkdv.keys_in_registers == (family in IN_REGISTERS)
        return (config.late_dq is not None) == (family in LATE_DQ)

    choice = first(where=fits)
    forward, backward = (choice, first()) if name in FORWARD_KERNELS else (first(), choice)
    launches = hopper_launches_of(call_of_family(*family[:3]), forward, backward)
    [launch] = [launch for launch in launches if launch.name == name]
    return launch


@functools.cache
def compiled(family: tuple, name: str) -> Compiled:
    return compile_launch(launch_of(family, name), "sm_90")


@pytest.mark.parametrize(("family", "name", "most_spilled"), ONE_OF_EACH)
def test_kernel_compiles(family: tuple, name: str, most_spilled: int) -> None:
    kernel = compiled(family, name)
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.spilled is not None
    assert kernel.spilled <= most_spilled
    assert not kernel.serialized
    assert not kernel.unset


@pytest.mark.sass
@pytest.mark.parametrize("family", BACKWARD)
def test_backward_compiles_for_hopper(family: tuple) -> None:
    """Exponentials overlap dout's product with v. With early_half_exps, half of them follow the wait for the next
    scores, which are issued before dk.
    """
    launch, kernel = launch_of(family, "backward"), compiled(family, "backward")
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.spilled is not None
    assert kernel.spilled <= BACKWARD_SPILL
    assert not kernel.serialized
    assert not kernel.unset
    config = launch.arguments["CONFIG"]
    chunks = len(config.head_dim.chunks)
    loops = inner_loops(kernel.code, 6, ("HGMMA", "MUFU.EX2", "STL", "LDL"))
    steps = [order for order in loops if len(waits_in(order)) >= 5]
    assert len(steps) >= 2  # one for each warpgroup
    for order in steps:
        waits = waits_in(order)
        # Waits: dout's product with v, with and without masks; dv, with dq in flight; dq; the next scores; dk.
        # dq takes two wgmmas, the other products one for each chunk.
        assert [int(order[n][-1]) for n in waits] == [0, 0, 2, 2 * chunks, chunks, 0]
        products = [n for n, word in enumerate(order) if word == "HGMMA"]
        for begin, end in ((-1, waits[0]), (waits[1], waits[2]), (waits[2], waits[3])):
            assert any(begin < n < end for n in products)
        assert products[-1] < waits[3]
        late, early = (part.count("MUFU.EX2") for part in (order[: waits[0]], order[waits[4] :]))
        assert late + early == order.count("MUFU.EX2") > 0
        assert early == (late if config.early_half_exps else 0)


@pytest.mark.sass
@pytest.mark.parametrize("family", LATE_DQ)
def test_late_dq_compiles_for_hopper(family: tuple) -> None:
    """dq is added by fours, each aligned to 16 bytes: a thread's registers have an order of their own."""
    launch, kernel = launch_of(family, "backward"), compiled(family, "backward")
    assert launch.arguments["CONFIG"].late_dq
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.spilled <= BACKWARD_SPILL
    assert not kernel.serialized
    assert not kernel.unset
    offsets = re.findall(r"REDG\.E\.ADD\.F32x4\S* desc\[\w+\]\[R\d+\.64(?:\+0x(\w+))?\]", kernel.code)
    assert len(offsets) > 0
    assert all(int(offset or "0", 16) % 16 == 0 for offset in offsets)


@pytest.mark.sass
@pytest.mark.parametrize("family", SPLIT_BACKWARD)
def test_split_backward_compiles_for_hopper(family: tuple) -> None:
    """In dq, exponentials overlap dout's product with values; in dkdv, they stand between dv's two products, or overlap
    the next scores.
    """
    dq, dkdv = (compiled(family, name) for name in ("dq", "dkdv"))
    for kernel in (dq, dkdv):
        assert kernel.shared <= SHARED_MEMORY
        assert kernel.spilled is not None
        assert kernel.spilled <= (
            SPLIT_BACKWARD_SPILL.get(family, 0)
            if support.triton_version() == support.OLDEST
            else NEWER_TRITON_SPLIT_SPILL
        )
        assert not kernel.serialized
        assert not kernel.unset
    config = launch_of(family, "dkdv").arguments["CONFIG"]
    values, early = len(config.head_dim_v.chunks), config.keys_in_registers
    for sass, waits in ((dq.code, [values, 0, 0]), (dkdv.code, [values, 0] if early else [0, 0])):
        steps = inner_loops(sass, most_waits=3)
        assert len(steps) >= len(waits) - 1  # dq: one for each warpgroup; dkdv: only dv's
        for order in steps:
            at = [n for n, word in enumerate(order) if "DEPBAR" in word]
            assert [int(order[n][-1]) for n in at] == waits
            exponentials = [n for n, word in enumerate(order) if word == "MUFU.EX2"]
            first, last = (-1, at[0]) if early and sass is dkdv.code else at[:2]
            assert first < exponentials[0] < exponentials[-1] < last


@pytest.mark.sass
@pytest.mark.parametrize("name", ["float32_forward", "dq", "dkdv"])
@pytest.mark.parametrize("family", [(name, VARIANTS[name].head_dim, SHORT) for name in FLOAT32])
def test_float32_compiles_for_hopper(family: tuple, name: str) -> None:
    kernel = compiled(family, name)
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.spilled <= FLOAT32_SPILL[name][support.triton_version() != support.OLDEST]
    assert not kernel.serialized
    assert not kernel.unset


@pytest.mark.sass
@pytest.mark.parametrize("family", CHOSEN)
def test_compiles_for_hopper(family: tuple) -> None:
    kernel = compiled(family, "forward")
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.spilled is not None
    assert kernel.spilled <= (
        MORE_FORWARD_SPILL.get(family, FORWARD_SPILL)
        if support.triton_version() == support.OLDEST
        else NEWER_TRITON_SPILL
    )
    assert not kernel.serialized
    assert not kernel.unset


@pytest.mark.sass
@pytest.mark.parametrize("family", CHOSEN)
def test_overlap_of_forward(family: tuple) -> None:
    """In each step, the products with keys and with values are in flight together. Speculative exponentials stand
    between the maxima and the branch for a changed row_max, before the wait for the values' product. Rescaling has a
    branch of its own.
    """
    config = launch_of(family, "forward").arguments["CONFIG"]
    loops = inner_loops(compiled(family, "forward").code, first=("HGMMA", "LDL"))
    assert len(loops) == config.num_warpgroups  # one for each warpgroup
    for order in loops:
        waits, exponentials, maxima, products, votes, rescaling = (
            [n for n, word in enumerate(order) if kind in word]
            for kind in ("DEPBAR", "MUFU.EX2", "FMNMX", "HGMMA", "VOTE", "FMUL")
        )
        # Waits: the scores, with the products of all chunks of values in flight; then these.
        assert [order[n][-1] for n in waits] == [str(len(config.head_dim_v.chunks)), "0"]
        assert products[-1] < waits[0] < maxima[0]
        assert "STL" not in order
        assert order.count("LDL") <= (0 if support.triton_version() == support.OLDEST else NEWER_TRITON_LOADS)
        [vote] = votes
        assert vote < waits[1]
        branch = order.index("BRA", vote)
        assert sum(maxima[0] < n < branch for n in exponentials) >= config.speculative_exps
        assert "BRA" in order[rescaling[-1] - 1 - sum(config.head_dim_v.chunks) // 2 : rescaling[-1]]


@pytest.mark.sass
@pytest.mark.parametrize("family", [("causal", 512, SHORT), ("packed everything 512/264", 512, SHORT)])
def test_wide_backward_compiles_for_hopper(family: tuple) -> None:
    """dq, dk and dv. Each of dq's warpgroups multiplies for all scores, and those of dk and dv for its own."""
    launches = [x for x in hopper_launches_of(call_of_family(*family)) if "dq" in x.name or "dkdv" in x.name]
    kernels = [compile_launch(x, "sm_90") for x in launches]
    for kernel, spill, products in zip(kernels, (WIDE_DQ_SPILL, 16, 16), (136, 68, 40), strict=True):
        assert kernel.shared <= SHARED_MEMORY
        assert kernel.spilled <= spill
        assert not kernel.serialized
        assert not kernel.unset
        assert kernel.code.count("HGMMA") == products


@pytest.mark.sass
@pytest.mark.parametrize("name", ["full", "causal", "paged 512"])
def test_wide_forward_compiles_for_hopper(name: str) -> None:
    """The first warpgroup waits for each chunk of keys but the last with the next one's product in flight, for its
    scores with the products of its two chunks of values, and for these; the second one and the end for products alone.
    """
    family = name, 512, SHORT
    kernel = compiled((*family, 1), "wide_forward")
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.spilled <= WIDE_SPILL
    assert not kernel.serialized
    assert not kernel.unset
    waits = "".join(re.findall(r"DEPBAR\.LE gsb0, 0x(\d)", kernel.code))
    assert waits.replace("11120", "", 1) == "00"
    assert kernel.code.count("HGMMA") == 4 * 8 + 3 * 2 * 4  # scores; p and values in two places and in the other half


def waits_in(order: list[str]) -> list[int]:
    """Positions of the waits for wgmmas."""
    return [n for n, word in enumerate(order) if "DEPBAR" in word]


def inner_loops(sass: str, most_waits: int = 2, first: tuple[str, ...] = ("HGMMA",)) -> list[list[str]]:
    """Instructions of the steps inside a tile: wgmmas, waits and softmax instructions, in order.

    Steps are the innermost loops with at most `most_waits` waits that begin with one of `first`. A retried wait for TMA
    also jumps back, out of the middle of a step.
    """
    lines, labels, steps = sass.splitlines(), {}, []
    for n, line in enumerate(lines):
        if (label := re.match(r"(\.L_x_\d+):", line.strip())) is not None:
            labels[label[1]] = n
        jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if jump is not None and jump[1] in labels:
            body = "\n".join(lines[labels[jump[1]] : n])
            order = re.findall(r"HGMMA|MUFU\.EX2|FMNMX|FMUL|VOTE\b|BRA|STL|LDL|WARPGROUP\.DEPBAR\.LE gsb0, 0x\d", body)
            while order[:1] == ["BRA"]:  # of waits for TMA
                del order[0]
            if order[:1] and order[0] in first and "MUFU.EX2" in order and len(waits_in(order)) <= most_waits:
                steps.append((labels[jump[1]], n, order))
    return [x[2] for x in steps if not any(y is not x and x[0] <= y[0] and y[1] <= x[1] for y in steps)]
