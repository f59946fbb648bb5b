"""Problems that the Hopper backend accepts, and the reasons why it declines the others."""

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...call.call import NO_FEATURES, Call, Needs
from ...call.device import Device
from ...call.plan import Plan
from ...call.problem import OCTET, Problem, too_long
from ...call.window import Window
from ...expression import Formula
from ..gpu.decoding import is_decoding
from ..gpu.formula import unsupported as unsupported_tensor
from ..gpu.installed import triton_version
from .widths import FUSED, ONE_BOX, WIDTHS, widths

if TYPE_CHECKING:
    from .tile_config import TileConfig

SUMMARY = "Gluon kernels for Hopper GPUs, the fastest there"
ARCHITECTURE = "sm_90"
HEAD_DIM_STEP = 8  # elements of 16 bytes, which TMA needs rows to be a multiple of
TMA_ALIGNMENT = 16  # bytes, of rows
PAGE_STEP = 8  # keys: rows that shared memory swizzles together
# Head dimension up to which Triton's kernels are faster, and up to which they are in small calls without a mask tensor,
# which they read more slowly in backward (docs/journal/2026-11-24-masks.md, 2026-11-25-short-rows.md).
NARROWEST, NARROW = 16, 32
NARROWEST_FLOAT32, NARROW_FLOAT32 = 32, 64  # up to here, Triton's kernels; and in other calls than plain backward ones
SHORT_FLOAT32 = 64  # rows or keys up to which splitting rows is not worth a launch (counted, not measured)
SHORT, SHORT_BIASED = 256, 128  # rows; with a bias, which TMA loads here, rows or keys
SHORT_BIASED_BACKWARD = 64  # the same in backward, where few heads are faster here as well
MIN_ROWS, MOST_KEYS, MIN_HEADS = 32, 512, 5  # of calls of up to 64 rows that run here; heads for each core
# The same in forward above 80 features, of one wave of heads: part of the cores that they fill, and least keys.
ONE_WAVE, MANY_KEYS = 0.9, 4000
# Above 64 features: pairs of a head up to which Triton's kernels have a tile for all, and keys of a tile here, of which
# backward needs one for each core (docs/journal/2026-11-26-backward-queues.md).
MOST_PAIRS, TILE_KEYS = 64 * 64, 128
TILE_ROWS = 128
# Rows and keys of which Triton has a kernel for all gradients of a head, and keys of its steps. Times of a step there,
# and here of all launches, of a wave of tiles, and of it for each such step (docs/journal/2026-11-26-forms.md).
WHOLE, STEP_KEYS = range(129, 257), 64
STEP, LAUNCHES, TILE, TILE_STEP = 6.6, 12.0, 6.0, 1.4
FEW_KEYS, FEW_TILES = 2048, 4  # tiles of rows for each core
LISTED = 128  # head dimension up to which backward visits lists of blocks
# Pairs of a head from which Triton's kernels, with lists of a mask's blocks, need less time for documents than all
# pairs here, where the kernels have no lists: in backward over 128 features. At 4096 x 4096 they need two to four times
# as much (docs/journal/2026-11-23-score-functions.md).
LONG_MASK_PAIRS = 8192**2
CAPS = {"tanh", "sigmoid"}  # operations of an exponential and a division
OLDEST = (3, 6)  # version of Triton; Gluon is experimental and changes between them
NEWEST = (3, 9)  # version of Triton whose kernels passed the tests on a GPU


def unsupported() -> str | None:
    """Why the installed Triton cannot compile the kernels; `None` if it can."""
    version = triton_version()
    if version is None:
        return "triton is not installed (PyTorch's GPU builds bring it)"
    if version < OLDEST:
        oldest, installed = (".".join(map(str, x)) for x in (OLDEST, version))
        return f"its kernels need Triton {oldest} or newer; this is {installed}"
    return None


class KernelClass(NamedTuple):
    """Kernels that are compiled alike: the unit of a self-check."""

    backward: bool
    head_dim: int
    head_dim_v: int
    packed: bool
    num_warpgroups: int  # of the forward kernel's consumers
    float32: bool = False

    def __str__(self) -> str:
        direction, layout = "backward" if self.backward else "forward", "packed" if self.packed else "dense"
        widths = f"head dimensions {self.head_dim} and {self.head_dim_v}" + ", float32" * self.float32
        warpgroups = {1: ", one warpgroup", 3: ", three warpgroups"}.get(self.num_warpgroups, "")
        return f"{direction}, {layout}, {widths}{warpgroups}"


def unknown_kernels(problem: Problem, device: Device, needs: Needs | None) -> KernelClass | None:
    """The kernels of a pass that need a self-check: the installed Triton is newer than those known for them."""
    version = triton_version()
    if version is None or version <= NEWEST:
        return None
    backward, packed = needs is not None, problem.layout == "varlen"
    num_warpgroups = 2 if backward else tile(problem, device).forward.num_warpgroups
    float32 = problem.dtype is torch.float32
    return KernelClass(backward, problem.head_dim, problem.head_dim_v, packed, num_warpgroups, float32)


@functools.cache
def unusable() -> str | None:
    """Why the backend does not run on this machine; `None` if it does."""
    if (reason := unsupported()) is not None:
        return reason
    if not torch.cuda.is_available():
        return "no GPU that PyTorch can use"
    if not any(torch.cuda.get_device_capability(n) == (9, 0) for n in range(torch.cuda.device_count())):
        return "no Hopper GPU (compute capability 9.0)"
    return None


def declines(problem: Problem, device: Device) -> str | None:
    """Why the backend does not support the problem; `None` if it does."""
    if device.arch != ARCHITECTURE:
        return f"its kernels are for Hopper GPUs ({ARCHITECTURE}), not for {device.arch}"
    if problem.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return "it supports bfloat16, float16 and float32 inputs only"
    if problem.dtype is torch.float32 and (reason := declines_float32(problem)) is not None:
        return reason
    if widths(problem) is None or any(d % HEAD_DIM_STEP for d in (problem.head_dim, problem.head_dim_v)):
        return f"it supports head dimensions that are multiples of {HEAD_DIM_STEP} up to {WIDTHS[-1][0]}"
    unsupported = [name for name in ("seqused_q", "leftpad_k") if getattr(problem, name)]
    unsupported += ["attention_chunk"] if problem.window.chunk is not None else []
    if unsupported:
        return f"it does not support {' or '.join(unsupported)}"
    if problem.octet_start:
        return f"with dropout, it supports parts of a call that begin at a multiple of {OCTET} keys"
    if (reason := problem.untraced) is not None:
        return reason
    for formula in (problem.score_mod, problem.mask_mod):
        if isinstance(formula, Formula) and (reason := unsupported_tensor(formula)) is not None:
            return reason
    if (reason := declines_pages(problem)) is not None:
        return reason
    if problem.alignment < TMA_ALIGNMENT:
        return f"TMA needs rows of q, k and v aligned to {TMA_ALIGNMENT} bytes"
    if min(problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k) == 0:
        return "the call is empty"
    return too_long(problem)


def declines_float32(problem: Problem) -> str | None:
    """Why the kernels do not take a problem in float32; `None` if they do."""
    functions = problem.score_mod is not None or problem.mask_mod is not None
    features = problem.features != NO_FEATURES or problem.softcap or problem.dropout or functions
    if features or problem.pages is not None:
        return "in float32, it supports neither pages nor features but windows"
    if max(problem.head_dim, problem.head_dim_v) <= NARROWEST_FLOAT32:
        return f"in float32, it supports head dimensions above {NARROWEST_FLOAT32}"
    return None


def declines_pages(problem: Problem) -> str | None:
    """Why the kernels do not read the problem's pages; `None` if they do, or if there are none."""
    pages = problem.pages
    if pages is None:
        return None
    if pages.several and pages.size % PAGE_STEP != 0:
        return f"it supports pages of multiples of {PAGE_STEP} keys"
    if not pages.in_rows:
        return "TMA needs pages that begin whole numbers of rows apart"
    features = problem.features
    others = problem.dropout or problem.score_mod or problem.mask_mod
    if others or features.bias is not None or features.mask is not None:
        return "with pages, it does not support dropout, biases, masks and score_mods"
    return None


def declines_backward(problem: Problem, device: Device, needs: Needs) -> str | None:
    """Why the backward pass does not support a problem that the forward pass supports."""
    if problem.pages is not None:
        return "its backward pass does not support pages"
    if problem.softcap and widths(problem) in ONE_BOX:
        return "its backward pass is no faster with a softcap up to head dimension 64"
    if needs.alibi_slopes and (problem.softcap or widths(problem) not in FUSED):
        return f"its backward pass has no gradient of ALiBi slopes over {FUSED[-1][0]} features or with a softcap"
    if needs.bias:
        return "its backward pass has no gradient of a bias"
    if any(needs.score_mod_tensors):
        return "its backward pass has no gradients of tensors that a score_mod captures"
    return None


def defers(problem: Problem, device: Device, needs: Needs | None = None) -> str | None:
    """Why `auto` leaves a supported problem to the next backend; with `needs`, its backward pass."""
    caps = problem.softcap or (isinstance(problem.score_mod, Formula) and problem.score_mod.operations & CAPS)
    if caps and widths(problem) in ONE_BOX:
        return "with a softcap up to head dimension 64, exponentials take longer than these kernels can overlap"
    if problem.mask_mod is not None and is_faster_with_lists(problem):
        return "long masks are faster where hidden blocks are skipped"
    head_dim = max(problem.head_dim, problem.head_dim_v)
    if head_dim <= NARROWEST:
        return f"up to head dimension {NARROWEST}, narrower kernels are faster"
    if head_dim <= NARROW and problem.features.mask is None and wants_smaller_tiles(problem, device, needs):
        return f"up to head dimension {NARROW} and {FEW_KEYS} keys, smaller tiles are faster"
    if problem.dtype is torch.float32 and head_dim <= NARROW_FLOAT32 and not narrow_float32(problem, needs):
        return f"in float32 up to head dimension {NARROW_FLOAT32}, smaller tiles are faster or were not compared"
    if problem.dtype is torch.float32 and min(problem.seqlen_q, problem.seqlen_k) <= SHORT_FLOAT32:
        return f"in float32 with up to {SHORT_FLOAT32} rows or keys, kernels that split no rows take fewer launches"
    if is_decoding(problem) and not fills_device(problem, device, needs):
        return "decoding a few rows is faster with keys split among programs"
    if needs is not None and is_faster_whole(problem, device, needs):
        return f"up to {WHOLE[-1]} rows and keys of few heads are faster in one kernel for all gradients"
    return None


def wants_smaller_tiles(problem: Problem, device: Device, needs: Needs | None) -> bool:
    """Whether a problem of few features is short in backward or with a bias, too small to fill the device, or has
    features that were not measured here.
    """
    p = problem
    others = p.features._replace(bias=None) != NO_FEATURES or p.dropout or p.score_mod or p.mask_mod
    rows, shorter = p.counts.rows, min(p.seqlen_q, p.seqlen_k)
    few = p.batch * p.num_heads_q * -(-p.seqlen_q // TILE_ROWS) < FEW_TILES * device.cores
    if p.features.bias is None:
        short = needs is not None and rows < SHORT
    elif needs is None:
        short = shorter <= SHORT_BIASED
    else:
        short, few = shorter <= SHORT_BIASED_BACKWARD, False
    return p.seqlen_k <= FEW_KEYS and bool(short or few or others or p.layout != "dense")


def fills_device(problem: Problem, device: Device, needs: Needs | None) -> bool:
    """Whether heads of up to 64 rows fill the device without splits of their keys (in backward, their blocks of keys),
    in calls that were measured to be faster here (docs/journal/2026-11-25-requests.md).
    """
    p = problem
    modified = p.softcap or p.dropout or p.score_mod or p.mask_mod or p.features != NO_FEATURES
    if modified or p.layout != "dense" or p.num_heads_q != p.num_heads_kv:
        return False
    heads, rows = p.batch * p.num_heads_q, p.counts.rows
    if needs is not None:
        wide = widths(p) in FUSED and widths(p) not in ONE_BOX
        several = p.seqlen_q * p.seqlen_k > MOST_PAIRS and heads * -(-p.seqlen_k // TILE_KEYS) >= device.cores
        single = widths(p) == FUSED[-1] and heads >= device.cores and max(rows, p.seqlen_k) > MIN_ROWS
        return single or (wide and several)
    one_wave = ONE_WAVE * device.cores <= heads <= device.cores and p.seqlen_k >= MANY_KEYS
    if rows >= MIN_ROWS and one_wave and widths(p) in FUSED[3:]:
        return True
    measured = widths(p) in (*ONE_BOX, FUSED[-1])
    return measured and rows >= MIN_ROWS and p.seqlen_k <= MOST_KEYS and heads >= MIN_HEADS * device.cores


def narrow_float32(problem: Problem, needs: Needs | None) -> bool:
    """Whether a float32 call of few features is faster here: backward of dense calls, causal ones too."""
    return needs is not None and problem.layout == "dense" and problem.window in (Window(), Window(right=0))


def is_faster_whole(problem: Problem, device: Device, needs: Needs) -> bool:
    """Whether Triton's kernel for all gradients of a head, one a core, takes less time than tiles of 128 keys here."""
    p = problem
    modified = p.softcap or p.dropout or p.score_mod or p.mask_mod or p.features != NO_FEATURES
    plain = p.layout == "dense" and not modified and p.window.unlimited and p.num_heads_q == p.num_heads_kv
    plain = plain and needs.q and needs.k and needs.v and p.dtype is not torch.float32
    keys = p.counts.keys
    if not plain or widths(p) != ONE_BOX[-1] or p.seqlen_q not in WHOLE or p.seqlen_k not in WHOLE:
        return False
    heads, steps = p.counts.batch * p.num_heads_q, -(-keys // STEP_KEYS)
    waves = -(-heads * -(-keys // TILE_ROWS) // device.cores)
    return -(-heads // device.cores) * steps * STEP < LAUNCHES + waves * (TILE + TILE_STEP * steps)


def is_faster_with_lists(problem: Problem) -> bool:
    """Whether Triton's kernels alone have lists of the blocks that a mask function shows, and it pays."""
    return (
        max(problem.head_dim, problem.head_dim_v) > LISTED
        and problem.layout == "dense"
        and problem.window.unlimited
        and problem.seqlen_q * problem.seqlen_k >= LONG_MASK_PAIRS
    )


def tile(problem: Problem, device: Device) -> "TileConfig":
    """Kernel configurations for the problem."""
    from . import float32_tables, head_splits, row_wave, splits, tables  # not needed by `import flashtile`

    if problem.dtype is torch.float32:
        return float32_tables.tile_config(problem)
    config = tables.tile_config(problem, device)
    if row_wave.is_divisible(problem):
        config = config._replace(forward=replace(config.forward, divides_last_wave=True))
    counted = problem.counted
    if config.backward.kind == "split":
        dkdv = config.backward.dkdv
        dkdv = replace(dkdv, head_splits=head_splits.of_dkdv(counted, device, dkdv))
        return config._replace(backward=replace(config.backward, dkdv=dkdv))
    backward = replace(config.backward, head_splits=head_splits.of_plan(counted, device, config.backward))
    backward = replace(backward, row_splits=splits.row_splits(counted, device, backward))
    backward = replace(backward, row_chunks=splits.row_chunks(counted, backward))
    return config._replace(backward=replace(backward, dq_parts=splits.dq_parts(counted, device, backward)))


def tiles(plan: Plan, call: Call, needs: Needs | None) -> dict[str, Any]:
    """The tiles of the kernels that a call runs in forward or, with `needs`, in backward, by name."""
    from .entry import called_forward

    return {"forward": called_forward(plan, call)} if needs is None else {"backward": plan.tile.backward}


def unsplit(plan: Plan, call: Call) -> str | None:
    """Why forward does not split keys into as many parts as the caller asks for, or `None`."""
    if plan.tile.forward.kind == "float32":
        return "hopper does not split keys in float32"
    return None if call.tensors.cu_seqlens_q is None else "hopper does not split keys of packed queries"


def tile_of(kernels: KernelClass, problem: Problem, device: Device) -> "TileConfig":
    """The problem's configurations, with the class's number of warpgroups, of which float32 has no choice."""
    from . import tables

    config, width = tile(problem, device), widths(problem)
    assert width is not None
    if kernels.float32:
        return config
    return config._replace(forward=tables.forward_config(width, kernels.num_warpgroups))


def num_splits(problem: Problem, device: Device) -> int:
    """Splits of the keys of few rows."""
    from . import splits

    forward = tile(problem, device).forward
    return 1 if forward.kind == "float32" else splits.num_splits(problem.counted, device, forward)
