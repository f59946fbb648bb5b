"""Layouts of tensors in memory, and whether their memory is still there."""

from collections.abc import Hashable, Sequence

from torch import Tensor

from .. import private_torch
from .eager import is_plain_eager

# A freed tensor has its offset for an address. Allocators keep far above this, or storage is looked at: the heap of a
# Python that is not position-independent, as Debian's, begins below.
LOWEST_ADDRESS = 2**32


def exists(x: Tensor, place: int) -> bool:
    """Whether there is memory behind a low address, or nothing that would need it."""
    return x.numel() == 0 or (place != 0 and x.untyped_storage().nbytes() > 0)


def freed(x: Tensor) -> bool:
    """Whether a tensor's elements are gone, as after `x.untyped_storage().resize_(0)`. Tensors that never had memory
    are not freed.
    """
    try:
        return x.data_ptr() < LOWEST_ADDRESS and x.numel() > 0 and x.untyped_storage().nbytes() == 0
    except RuntimeError:  # a transform's wrapper
        return False


def address(x: Tensor) -> int:
    """Data pointer; 1 (unaligned) for functorch wrappers, which have none."""
    try:
        return x.data_ptr()
    except RuntimeError:
        return 1


def layout_key(tensors: Sequence[Tensor | None]) -> Hashable:
    """Shape, strides, dtype, device and address modulo 16 of each tensor, `None` for an absent one. `None` in place of
    all if a tensor has no memory of its own, which is never kept.
    """
    try:
        return tuple(
            [
                None
                if x is None
                else (
                    x.shape,
                    x.stride(),
                    x.dtype,
                    x.device,
                    place % 16 if (place := x.data_ptr()) >= LOWEST_ADDRESS else low(x, place),
                )
                for x in tensors
            ]
        )
    except RuntimeError:  # a transform's wrapper, a freed tensor
        return None


class Layouts:
    """The layouts of tensors. `match` compares others with them in less time than a key of theirs takes, by a guard
    that compares dispatch keys, too. It is made of plain eager calls only: where it matches, there are no traces and
    transforms, the autocast is the same, and tensors require gradients as these did.
    """

    __slots__ = ("key", "same")

    def __init__(self, tensors: Sequence[Tensor]):
        self.key = layout_key(tensors)
        quick = self.key is not None and not repeats(tensors)
        quick = quick and is_plain_eager(*tensors) and all(map(is_aligned, tensors))
        self.same = private_torch.tensor_guard(tensors) if quick else None

    def match(self, tensors: Sequence[Tensor]) -> bool:
        slowly = self.same is None or repeats(tensors)  # PyTorch's guard takes no tensor twice
        return self.match_plain(tensors) or (slowly and layout_key(tensors) == self.key)

    def match_plain(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the layouts are the same and no tensor is more than its memory (`call.eager`); `False` in doubt."""
        if self.same is None or not self.same(*tensors):
            return False
        for x in tensors:  # as `is_aligned`, without a call each
            place = x.data_ptr()
            if place % 16 or (place < LOWEST_ADDRESS and not exists(x, place)):
                return False
        return True


def repeats(tensors: Sequence[Tensor]) -> bool:
    """Whether one of the tensors is there twice."""
    return len({*map(id, tensors)}) < len(tensors)


def is_aligned(x: Tensor) -> bool:
    """Whether a tensor begins at a multiple of 16 bytes, and surely has memory."""
    place = x.data_ptr()
    return place % 16 == 0 and (place >= LOWEST_ADDRESS or (place != 0 and exists(x, place)))


def low(x: Tensor, place: int) -> int | None:
    """`place % 16` of a low address; `None` for no address, as of a tensor without elements.

    Raises:
        RuntimeError: there should be memory, and is none.
    """
    if not exists(x, place):
        raise RuntimeError("no memory")
    return place % 16 if place else None
