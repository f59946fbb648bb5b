"""Bits of the pairs that a mask function shows in partly visible blocks (`kernels.pair_bits`), made on the device."""

from torch import Tensor

from ...call.call import Call
from ...call.formulas import mask_formula
from ...expression.blocks import depends_on
from ..gpu.captured import needs_wide_offsets
from ..gpu.kernel import Kernel
from ..gpu.replay import Recorder
from .formulas import launch_with, pair_function
from .tables import MMA_M, PairBitsConfig

MOST_PAIRS = 2**30  # with bits, of all sequences: a byte of memory for eight of them
WORDS = 4  # of a line and a block
MOST_PROGRAMS = 8  # of a list
PAIR_BITS = Kernel(f"{__package__}.kernels.pair_bits", "pair_bits_kernel")


def has_pair_bits(call: Call) -> bool:
    """Whether a call with lists of blocks also has bits of pairs: they are those of all heads, and no score_mod reads
    the mask's tensors at its side.
    """
    formula = mask_formula(call)
    if formula is None or call.settings.score_mod is not None or depends_on(formula, "h"):
        return False
    batch = call.tensors.q.shape[0] if depends_on(formula, "b") else 1
    return batch * call.tensors.q.shape[2] * call.tensors.k.shape[2] <= MOST_PAIRS


def pair_bits(recorder: Recorder, call: Call, lists: Tensor, config: PairBitsConfig) -> Tensor:
    """Launch the kernel for the bits of these lists `[1 | 2, B | 1, 1, tiles, entries]`."""
    _, batch, _, tiles, entries = lists.shape
    formula = mask_formula(call)
    assert formula is not None
    bits = recorder.new(lists.new_empty((batch, tiles, entries, config.lines, WORDS)))
    function = pair_function(formula, any(needs_wide_offsets(x) for x in call.tensors.score_mod_tensors))
    programs = min(MOST_PROGRAMS, entries - 2)
    scalars = {
        "stride_lists": entries,
        "num_tiles": tiles,
        "num_programs": programs,
        "CONFIG": config,
        "num_warps": 4,
    }
    pointers = {"lists": lists, "mask_bits": bits}
    grid = batch * tiles * programs * (config.lines // MMA_M)
    launch_with(recorder, call, PAIR_BITS, pointers, grid, scalars, function)
    return bits
