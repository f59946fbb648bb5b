"""The bias of a call in tiles that TMA loads (`kernels.shared.bias_tiles`)."""

from dataclasses import replace
from typing import Any

from ...call.call import Call
from ..gpu.pairs import ALIGN as PAIR_ALIGN
from ..gpu.pairs import row_align
from ..gpu.pointers import Described
from .descriptors import dense_descriptor
from .listed import has_pair_bits
from .tables import BACKWARD_BIAS_STAGES, FORWARD_BIAS_STAGES, TWO_WARPGROUPS
from .tile_config import MMA_M, ForwardConfig, FusedBackwardConfig


def forward_tiles(call: Call, config: ForwardConfig) -> tuple[ForwardConfig, dict[str, Any]]:
    """The configuration and the pointer for a bias in tiles of a warpgroup's rows and a block of keys. Their memory is
    that of stages of keys and values.
    """
    config, bias = with_room(call, config), call.tensors.bias
    stages = FORWARD_BIAS_STAGES.get((config.num_warpgroups, config.head_dim.width))
    if stages is None or bias is None or not fits(call):
        return config, {"bias_desc": None}
    config = replace(config, bias_stages=stages.bias, stages=stages.keys, q_stages=stages.queries)
    return config, {"bias_desc": Described(bias, dense_descriptor, (MMA_M, config.block_n))}


def with_room(call: Call, config: ForwardConfig) -> ForwardConfig:
    """The configuration, or that of two warpgroups where a bias has no tiles or a mask no bits, unlike what the plan of
    several lengths expects: warpgroups that read these themselves need more registers.
    """
    masked = call.tensors.mask is not None or call.settings.mask_mod is not None
    reads_bias = call.tensors.bias is not None and not fits(call)
    reads_mask = masked and (config.splits > 1 or not has_pair_bits(call))
    if (config.num_warpgroups == 1 and reads_bias) or (config.num_warpgroups in (1, 3) and reads_mask):
        return TWO_WARPGROUPS[config.head_dim.width, config.head_dim_v.width].with_splits(config.splits)
    return config


def backward_tiles(call: Call, config: FusedBackwardConfig) -> tuple[FusedBackwardConfig, dict[str, Any]]:
    """As `forward_tiles`, for a block of rows and a warpgroup's keys."""
    stages, bias = BACKWARD_BIAS_STAGES.get(config.head_dim.width, 0), call.tensors.bias
    if stages == 0 or bias is None or not fits(call):
        return config, {"bias_desc": None}
    box = config.block_m, MMA_M
    return replace(config, bias_stages=stages), {"bias_desc": Described(bias, dense_descriptor, box)}


def fits(call: Call) -> bool:
    """Whether TMA can load the bias: numbers of 16 bits for each row and key, in aligned rows. With a softcap, a
    score_mod or the code of a mask function, scores are computed where tiles are no longer there.
    """
    bias, settings = call.tensors.bias, call.settings
    mask_code = settings.mask_mod is not None and not has_pair_bits(call)
    if bias is None or settings.softcap is not None or settings.score_mod is not None or mask_code:
        return False
    expanded = any(n > 1 and stride == 0 for n, stride in zip(bias.shape, bias.stride(), strict=True))
    for_pairs = bias.shape[2] > 1 and bias.shape[3] > 1 and not expanded
    return for_pairs and bias.element_size() == 2 and row_align(call.tensors) == PAIR_ALIGN
