"""Whether tensors that are written share elements: decided exactly, from addresses and strides alone."""

from typing import Any

from torch import Tensor

MOST_WORK = 10**6  # steps of NumPy's search, which few strides need


class Elements:
    """The places of a tensor's elements as NumPy's array interface describes them, on any device."""

    def __init__(self, x: Tensor):
        size = x.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (x.data_ptr(), True),
            "shape": tuple(x.shape),
            "strides": tuple(stride * size for stride in x.stride()),
        }


def apart(x: Tensor, y: Tensor) -> bool:
    """Whether all of `x` lies before or behind all of `y`."""
    first, last = sorted((x, y), key=Tensor.data_ptr)
    reach = sum((n - 1) * stride for n, stride in zip(first.shape, first.stride(), strict=True))
    return 0 in (x.numel(), y.numel()) or first.data_ptr() + (reach + 1) * first.element_size() <= last.data_ptr()


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether an element of `x` and one of `y` share memory."""
    import numpy as np

    return share(np.asarray(Elements(x)), np.asarray(Elements(y)))


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of `x` share memory. Two that do differ first in some dimension; moved together to its
    beginning, one of them has index 0 there, and they still share memory.
    """
    import numpy as np

    part = np.asarray(Elements(x))
    while part.ndim and part.size:
        if share(part[:1], part[1:]):
            return True
        part = part[0, ...]  # a view in each case: an element would be read, which may lie on a GPU
    return False


def share(x: Any, y: Any) -> bool:
    """Whether two arrays share memory; True as well for strides that are too entangled to tell."""
    import numpy as np

    try:
        return np.shares_memory(x, y, max_work=MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
