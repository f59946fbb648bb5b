"""Mask functions: whether a pair is visible."""

from .modifier import Modifier
from .purity import MASK_MOD


class MaskMod(Modifier):
    """A mask function `fn(b, h, q_idx, k_idx, *tensors)` with the tensors it reads: whether key `k_idx` is visible to
    row `q_idx` in sequence `b` and head `h`.

    `fn` gets int64 index tensors that broadcast against each other, and returns a bool tensor that broadcasts to the
    pairs of a tile. It must be a pure function of torch operations, without random numbers and in-place operations on
    its arguments: it runs on tiles of any size, and again in backward. Positions count from the start of each
    sequence. A mask has no gradient, nor have its tensors.

    Example:
        >>> def within(b, h, q_idx, k_idx, lengths):
        ...     return (k_idx <= q_idx) & (k_idx < lengths[b])
        >>> q, k, v = (torch.randn(2, 4, 64, 32) for _ in range(3))
        >>> mask = flashtile.MaskMod(within, (torch.tensor([64, 17]),))
        >>> flashtile.attention(q, k, v, mask=mask).shape
        torch.Size([2, 4, 64, 32])
        >>> print(mask)
        (k_idx <= q_idx) & (k_idx < tensor0[b])

    The function is traced once, as in a `flashtile.ScoreMod`, with the same rules for tensors, numbers, pickling,
    `torch.compile` and `torch.export`. Several ones are combined by `flashtile.mask_mods.and_masks` and `or_masks`. The
    signature is `mask_mod`'s in Dong et al., "Flex Attention", 2024, with the tensors at its end.

    Args:
        fn: the function of torch operations.
        tensors: what `fn` gets after the indices: tensors of any shape and dtype, on q's device.

    Raises:
        ArgumentError: `fn` is not callable, a variable of its closure has no value yet, or an entry of `tensors` is no
            tensor; or `fn` draws random numbers, works in place, or does not return a bool tensor.
    """

    role = MASK_MOD
