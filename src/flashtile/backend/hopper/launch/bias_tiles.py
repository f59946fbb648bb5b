"""The bias of a call in tiles that TMA loads (`kernels.shared.bias_tiles`)."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call.call import Call
from ...gpu.kernel import Kernel
from ...gpu.pairs import ALIGN, has_aligned_rows
from ...gpu.pointers import Described
from ...gpu.replay import Recorder
from ..backward_config import FusedBackwardConfig
from ..plan.listed import has_pair_bits
from ..plan.tables import FORWARD
from ..plan.widths import FUSED, ONE_BOX
from ..tile_config import MMA_M, ForwardConfig
from . import KERNELS
from .descriptors import dense_descriptor

# Pairs for each element of a bias from which a copy with aligned rows takes less time than it saves.
FORWARD_SHARE, BACKWARD_SHARE = 2, 1
FEW_TILES = 2 * 132  # tiles of a warpgroup's rows: two for each core
ALIGN_ROWS = Kernel(f"{KERNELS}.align_rows", "align_rows_kernel")
COPIED_ROWS, COPIED_WORDS = 16, 128  # a program's part
UNITS = {1: torch.int16, 2: torch.int32, 4: torch.int64}  # words by their elements


class BiasStages(NamedTuple):
    """Stages of the forward kernel for tiles of a bias, and what they leave for keys and values and for queries."""

    bias: int
    keys: int
    queries: int


# By warpgroups and width, where shared memory has room for tiles of 16-bit biases.
STAGES = {
    (1, 32): BiasStages(2, 3, 2),
    (1, 64): BiasStages(2, 2, 1),
    (2, 32): BiasStages(2, 4, 2),
    (2, 64): BiasStages(2, 3, 2),
    (2, 80): BiasStages(1, 2, 1),
    (2, 96): BiasStages(1, 2, 1),
    (2, 128): BiasStages(1, 2, 1),
}


def with_aligned_rows(
    recorder: Recorder, call: Call, config: ForwardConfig | FusedBackwardConfig, least_share: int
) -> Call:
    """The call with a bias that TMA can load, copied where its rows are not aligned and `least_share` pairs share each
    of its elements. The call's tensors are the recorder's.
    """
    t, bias, has_tiles = call.tensors, call.tensors.bias, config.head_dim.width <= FUSED[-1][0]
    if bias is None or not has_tiles or call.layout != "dense" or has_aligned_rows(bias) or not takes_tiles(call):
        return call
    if t.q.shape[0] * t.q.shape[1] < least_share * bias.shape[0] * bias.shape[1]:
        return call
    return call._replace(tensors=t._replace(bias=aligned_rows(recorder, bias)))


def aligned_rows(recorder: Recorder, bias: Tensor) -> Tensor:
    """A copy of a bias `[B, H, Sq, Sk]`, with zeros after its keys."""
    *leading, rows, keys = bias.shape
    aligned = recorder.new(bias.new_empty((*leading, rows, -(-keys // ALIGN) * ALIGN)))
    strides = [0 if n == 1 else stride for n, stride in zip(bias.shape[:3], bias.stride(), strict=False)]
    # At once, a thread copies as many elements as divide all addresses.
    unit = math.gcd(*strides, keys, bias.data_ptr() // bias.element_size(), max(UNITS))
    row_tiles, key_tiles = -(-rows // COPIED_ROWS), -(-aligned.shape[3] // unit // COPIED_WORDS)
    scalars = {
        **{f"stride_x_{dim}": stride // unit for dim, stride in zip("bhm", strides, strict=True)},
        "num_heads": bias.shape[1],
        "rows": rows,
        "keys": keys // unit,
        "pitch": aligned.shape[3] // unit,
        "row_tiles": row_tiles,
        "key_tiles": key_tiles,
        "BLOCK_M": COPIED_ROWS,
        "BLOCK_N": COPIED_WORDS,
        "num_warps": 4,
    }
    pointers = {name: Described(x, in_words, UNITS[unit]) for name, x in (("x", bias), ("aligned", aligned))}
    recorder.launch(ALIGN_ROWS, pointers, math.prod(leading) * row_tiles * key_tiles, scalars)
    return aligned


def in_words(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in words of several elements. `view` looks at strides of single sequences and heads too, which are
    never used.
    """
    strides = [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides).view(dtype)


def forward_tiles(call: Call, config: ForwardConfig) -> tuple[ForwardConfig, dict[str, Any]]:
    """The configuration and the pointer for a bias in tiles of a warpgroup's rows and a block of keys. Their memory is
    taken from stages of keys and values.
    """
    config, bias = with_room(call, config), call.tensors.bias
    stages = STAGES.get((config.num_warpgroups, config.head_dim.width))
    if stages is None or bias is None or not fits(call):
        return config, {"bias_desc": None}
    config = replace(config, bias_stages=stages.bias, stages=stages.keys, q_stages=stages.queries)
    return config, {"bias_desc": Described(bias, dense_descriptor, (MMA_M, config.block_n))}


def with_room(call: Call, config: ForwardConfig) -> ForwardConfig:
    """The configuration, or one with more registers where a bias has no tiles or a mask no bits, unlike what the plan
    of several lengths expects: warpgroups read these themselves. With few tiles, two programs of a core, of one
    warpgroup each, wait less for unaligned rows of a bias than one program of two.
    """
    masked = call.tensors.mask is not None or call.settings.mask_mod is not None
    reads_bias = call.tensors.bias is not None and not fits(call)
    reads_mask = masked and (config.splits > 1 or not has_pair_bits(call))
    if (config.num_warpgroups == 1 and reads_bias) or (config.num_warpgroups in (1, 3) and reads_mask):
        unaligned = call.layout == "dense" and takes_tiles(call) and not masked
        if unaligned and config.compiled == FORWARD[ONE_BOX[-1]][-1] and num_tiles(call) <= FEW_TILES:
            return replace(config, programs_per_core=2)
        two = FORWARD[config.head_dim.width, config.head_dim_v.width][0]
        return replace(two, heads_at_once=config.heads_at_once).with_splits(config.splits)
    return config


def num_tiles(call: Call) -> int:
    """Tiles of a warpgroup's rows of a dense call."""
    *leading, rows, _ = call.tensors.q.shape
    return math.prod(leading) * -(-rows // MMA_M)


def backward_tiles(call: Call, config: FusedBackwardConfig) -> tuple[FusedBackwardConfig, dict[str, Any]]:
    """As `forward_tiles`, for a block of rows and a warpgroup's keys."""
    bias = call.tensors.bias
    if bias is None or not fits(call):
        return config, {"bias_desc": None}
    box = config.block_m, MMA_M
    return replace(config, bias_stages=1), {"bias_desc": Described(bias, dense_descriptor, box)}


def fits(call: Call) -> bool:
    """Whether TMA can load the bias: in aligned rows."""
    return call.tensors.bias is not None and takes_tiles(call) and has_aligned_rows(call.tensors.bias)


def takes_tiles(call: Call) -> bool:
    """Whether TMA loads the bias by tiles: 16-bit and not broadcast. With a softcap, a score_mod or the code of a mask
    function, scores are computed where tiles are no longer there.
    """
    bias, settings = call.tensors.bias, call.settings
    mask_code = settings.mask_mod is not None and not has_pair_bits(call)
    if bias is None or settings.softcap is not None or settings.score_mod is not None or mask_code:
        return False
    expanded = any(n > 1 and stride == 0 for n, stride in zip(bias.shape, bias.stride(), strict=True))
    return bias.shape[2] > 1 and bias.shape[3] > 1 and not expanded and bias.element_size() == 2
