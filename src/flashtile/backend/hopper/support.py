"""Problems that the Hopper backend accepts, and the reasons why it declines the others."""

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...call.call import NO_FEATURES, Call, Needs
from ...call.device import Device
from ...call.eight_bit import QUERIES
from ...call.plan import Candidate, Plan
from ...call.problem import OCTET, Problem, too_long
from ...expression import Formula
from ..gpu.formula import unsupported as unsupported_tensor
from ..gpu.installed import triton_version
from .plan.listed import Masked
from .plan.widths import FUSED, ONE_BOX, SHARED_COLUMNS, WIDTHS, eight_bit_width, is_latent, widths

if TYPE_CHECKING:
    from ..gpu.cost import Cost

SUMMARY = "Gluon kernels for Hopper GPUs, the fastest there"
ARCHITECTURE = "sm_90"
HEAD_DIM_STEP = 8  # elements of 16 bytes, which TMA needs rows to be a multiple of
EIGHT_BIT_STEP = 16  # the same of 8 bits
ROUNDS_TO_EIGHT_BITS = True  # the probabilities of queries of 8 bits; to float16, those over latent rows of 8 bits
TMA_ALIGNMENT = 16  # bytes, of rows
PAGE_STEP = 8  # keys: rows that shared memory swizzles together
LATENT_PAGE_STEP = 64  # keys of a block of latent rows, which lies in one page
NARROWEST_FLOAT32 = 32  # head dimension up to which there are no kernels of float32
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
    num_warpgroups: int  # warpgroups of the forward kernel's consumers
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
    num_warpgroups = 2 if backward else candidates(problem, device, None)[0].tile.forward.num_warpgroups
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
    if problem.dtype is QUERIES:
        return declines_eight_bit(problem)
    if problem.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return "it supports bfloat16, float16, float32 and float8_e4m3fn inputs only"
    if problem.eight_bit is not None and not is_latent(problem):
        return "it reads keys and values of q's dtype, not of 8 bits, but latent rows"
    if problem.dtype is torch.float32 and (reason := declines_float32(problem)) is not None:
        return reason
    if is_latent(problem):
        if (reason := declines_latent(problem)) is not None:
            return reason
    elif widths(problem) is None or any(d % HEAD_DIM_STEP for d in (problem.head_dim, problem.head_dim_v)):
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
    if problem.batch_invariant and (reason := declines_batch_invariant(problem)) is not None:
        return reason
    if problem.alignment < TMA_ALIGNMENT:
        return f"TMA needs rows of q, k and v aligned to {TMA_ALIGNMENT} bytes"
    if min(problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k) == 0:
        return "the call is empty"
    return too_long(problem)


def declines_eight_bit(problem: Problem) -> str | None:
    """Why the kernel of 8 bits does not take a problem; `None` if it does."""
    p, of = problem, problem.eight_bit
    assert of is not None
    if of.format not in ("e4m3", "e5m2"):
        return "in 8 bits, it supports keys and values in float8_e4m3fn and float8_e5m2"
    if of.q_by_row or of.k_by_key or of.v_by_key:
        return "in 8 bits, it supports scales of heads"
    if p.latent or p.batch_invariant or p.seqused_q or p.leftpad_k:
        return "in 8 bits, it supports neither latent rows, batch_invariant, seqused_q nor leftpad_k"
    if p.dropout or p.window.chunk is not None:
        return "in 8 bits, it does not support dropout and attention_chunk"
    if (reason := declines_pages(p) or declines_eight_bit_formulas(p)) is not None:
        return reason
    if eight_bit_width(p) is None or any(d % EIGHT_BIT_STEP for d in (p.head_dim, p.head_dim_v)):
        return f"in 8 bits, it supports head dimensions that are multiples of {EIGHT_BIT_STEP} up to 256"
    if p.alignment < TMA_ALIGNMENT:
        return f"TMA needs rows of q, k and v aligned to {TMA_ALIGNMENT} bytes"
    if min(p.batch, p.num_heads_q, p.seqlen_q, p.seqlen_k) == 0:
        return "the call is empty"
    return too_long(p)


def declines_eight_bit_formulas(problem: Problem) -> str | None:
    """Why the kernel of 8 bits does not take a problem's mask or score_mod; `None` if it does."""
    if (reason := problem.untraced) is not None:
        return reason
    for formula in (problem.score_mod, problem.mask_mod):
        if isinstance(formula, Formula) and (reason := unsupported_tensor(formula)) is not None:
            return reason
    if problem.features.mask is None and problem.mask_mod is None:
        return None
    masked = Masked.of_problem(problem)
    if masked is None or not masked.has_pair_bits():
        return "in 8 bits, it supports masks of large dense calls, the same for all heads, without a score_mod"
    return None


def declines_float32(problem: Problem) -> str | None:
    """Why the kernels do not take a problem in float32; `None` if they do."""
    functions = problem.score_mod is not None or problem.mask_mod is not None
    features = problem.features != NO_FEATURES or problem.softcap or problem.dropout or functions
    if features or problem.pages is not None:
        return "in float32, it supports neither pages nor features but windows"
    if max(problem.head_dim, problem.head_dim_v) <= NARROWEST_FLOAT32:
        return f"in float32, it supports head dimensions above {NARROWEST_FLOAT32}"
    return None


def declines_latent(problem: Problem) -> str | None:
    """Why the kernel of latent rows does not take a problem; `None` if it does."""
    pages, plain = problem.pages, problem.features == NO_FEATURES and not problem.softcap
    if pages is None or problem.packed or problem.num_heads_kv > 1:
        return "of latent rows, it takes caches with one key head, and queries that are not packed"
    if problem.dtype is torch.float32 or not plain or has_unpaged_features(problem) or problem.batch_invariant:
        return "of latent rows, it takes 16 bits, without batch_invariant and features that change scores"
    if problem.window.left is not None or problem.window.top_left:
        return "of latent rows, it takes all keys before a query's last one"
    by_key = problem.eight_bit is not None and problem.eight_bit.v_by_key
    if by_key and problem.dtype is torch.float16:
        return "of latent rows of 8 bits with scales of keys, it takes queries in bfloat16"
    if pages.several and pages.size % LATENT_PAGE_STEP != 0:
        return f"of latent rows, it supports pages of multiples of {LATENT_PAGE_STEP} keys"
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
    if has_unpaged_features(problem):
        return "with pages, it does not support dropout, biases, masks and score_mods"
    return None


def declines_batch_invariant(problem: Problem) -> str | None:
    """Why the kernels do not take a batch-invariant problem; `None` if they take it packed and in pages."""
    if problem.decodes:
        return "with batch_invariant, it has no kernel for one query of each sequence"
    if problem.dtype is torch.float32 or has_unpaged_features(problem):
        return "with batch_invariant, it takes the dtypes and features that it has with pages, too"
    if problem.pages is not None and problem.pages.size % PAGE_STEP != 0:
        return f"with batch_invariant, it supports pages of multiples of {PAGE_STEP} keys"
    return None


def has_unpaged_features(problem: Problem) -> bool:
    """Whether a problem has features that the kernels lack with pages."""
    features = problem.features
    others = problem.dropout or problem.score_mod is not None or problem.mask_mod is not None
    return others or features.bias is not None or features.mask is not None


def declines_backward(problem: Problem, device: Device, needs: Needs) -> str | None:
    """Why the backward pass does not support a problem that the forward pass supports."""
    if problem.pages is not None:
        return "its backward pass does not support pages"
    if problem.dropout and widths(problem) in SHARED_COLUMNS:
        return f"its backward pass has no dropout over {WIDTHS[-2][0]} features"
    if problem.softcap and widths(problem) in ONE_BOX:
        return "its backward pass is no faster with a softcap up to head dimension 64"
    if needs.alibi_slopes and (problem.softcap or widths(problem) not in FUSED):
        return f"its backward pass has no gradient of ALiBi slopes over {FUSED[-1][0]} features or with a softcap"
    if needs.bias:
        return "its backward pass has no gradient of a bias"
    if any(needs.score_mod_tensors):
        return "its backward pass has no gradients of tensors that a score_mod captures"
    return None


def candidates(problem: Problem, device: Device, needs: Needs | None) -> list[Candidate]:
    """The ways to run a pass, the fastest first."""
    from ..gpu.cost import ranked  # not needed by `import flashtile`
    from ..gpu.rates import rates_of
    from .plan import candidates, cost
    from .tile_config import TileConfig

    ways: list[tuple[TileConfig, int, Cost]] = []
    if needs is None:
        for config, splits in candidates.forward(problem, device):
            ways.append((TileConfig(config, None), splits, cost.forward(problem, device, config, splits)))
    else:
        for backward in candidates.backward(problem, device):
            ways.append((TileConfig(None, backward), 1, cost.backward(problem, device, backward)))
    return ranked(ways, rates_of(device))


def declines_tangents(problem: Problem, device: Device, moves: Needs) -> str | None:
    """Why there is no forward mode of a problem that the forward pass supports."""
    from .plan.tables import TANGENTS  # not needed by `import flashtile`

    if problem.dtype is torch.float32:
        return "in float32, it has no kernel of forward mode"
    if problem.pages is not None:
        return "its kernel of forward mode does not support pages"
    if widths(problem) not in TANGENTS:
        return f"it has no kernel of forward mode for {problem.head_dim} and {problem.head_dim_v} features"
    if moves.sinks or any(moves.of_score_tensors().flat()):
        return "its kernel of forward mode takes tangents of q, k and v alone"
    return None


def tangent_candidates(problem: Problem, device: Device, moves: Needs) -> list[Candidate]:
    """The ways to run a forward pass with tangents, the fastest first: behind the fastest forward pass."""
    from ..gpu.cost import ranked  # not needed by `import flashtile`
    from ..gpu.rates import rates_of
    from .plan import candidates as plan
    from .plan import cost

    first = next(x for x in candidates(problem, device, None) if x.tile.forward.last_splits == 1)
    forward = cost.forward(problem, device, first.tile.forward, first.num_splits)
    ways = [
        (first.tile._replace(tangents=config), first.num_splits, cost.tangents(problem, device, forward, config, moves))
        for config in plan.tangents(problem)
    ]
    return ranked(ways, rates_of(device))


def unsplit(plan: Plan, call: Call) -> str | None:
    """Why forward does not split keys into as many parts as the caller asks for, or `None`."""
    if plan.tile.forward.kind == "float32":
        return "hopper does not split keys of float32"
    return None if call.tensors.cu_seqlens_q is None else "hopper does not split keys of packed queries"


def of_class(kernels: KernelClass, found: list[Candidate]) -> Candidate:
    """The fastest candidate with a class's number of warpgroups; float32 has no choice of them."""
    if kernels.backward or kernels.float32:
        return found[0]
    return next(x for x in found if x.tile.forward.num_warpgroups == kernels.num_warpgroups)
