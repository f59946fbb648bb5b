"""The kernels that a workload compiles: calls of one dtype, head dimension, mask and features, of all lengths and
batches.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..backend.gpu.replay import Launch
from ..call.device import Device
from ..call.problem import FEW_ROWS
from .build import key_of_launch
from .launches import launches
from .standard import StandardCall

PRODUCTS = (  # kernels that multiply; others prepare their inputs, convert, merge or make lists
    "forward_kernel", "float32_forward_kernel", "backward_kernel", "dq_kernel", "dkdv_kernel", "fused_kernel",
    "softmax_kernel", "gradient_kernel",
)  # fmt: skip
LENGTHS = (32, 64, 100, 128, 200, 256, 384, 512, 700, 1024, 1500, 2048, 3000, 4096, 8192, 16384, 65536)
BATCHES = (1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 32, 64)
MOST_ROWS = 2**18  # all sequences together
FORWARD, BACKWARD, DECODING = "forward", "backward", f"up to {FEW_ROWS} queries"


class Compiled(NamedTuple):
    """A compiled kernel, what it was compiled for, and the first call that needs it."""

    title: str
    constants: dict[str, Any]
    size: tuple[int, int, int]  # batch, rows and keys


Kernels = dict[tuple[str, str], Compiled]  # by title and key


def compiled_kernels(call_of: Callable[[int, int, int], StandardCall], device: Device) -> dict[str, Kernels]:
    """The kernels of products of calls by batch, rows and keys, which `call_of` makes: of forward, backward, and
    forward of a few queries.

    Raises:
        LookupError: no backend with kernels takes a call.
    """
    found: dict[str, Kernels] = {FORWARD: {}, BACKWARD: {}, DECODING: {}}
    with torch.no_grad():
        for batch, seqlen_q, seqlen_k in sizes():
            call = call_of(batch, seqlen_q, seqlen_k)
            of_forward = launches(call._replace(backward=False), device)
            note(found[DECODING if seqlen_q <= FEW_ROWS else FORWARD], of_forward, (batch, seqlen_q, seqlen_k))
            if call.backward and seqlen_q > FEW_ROWS:
                of_backward = launches(call, device)[len(of_forward) :]
                note(found[BACKWARD], of_backward, (batch, seqlen_q, seqlen_k))
    return found


def sizes() -> Iterator[tuple[int, int, int]]:
    """Batches, rows and keys: as many keys as rows, and a few queries of many keys."""
    for batch, length in itertools.product(BATCHES, LENGTHS):
        if batch * length <= MOST_ROWS:
            yield batch, length, length
            yield batch, 1, length


def note(kernels: Kernels, found: list[Launch], size: tuple[int, int, int]) -> None:
    """Note the kernels of products of launches that are not known yet."""
    for launch in found:
        if launch.kernel.name in PRODUCTS:
            key = launch.kernel.title, key_of_launch(launch)
            kernels.setdefault(key, Compiled(launch.kernel.title, constants_of(launch), size))


def constants_of(launch: Launch) -> dict[str, Any]:
    """The constants that a launch compiles its kernel for, and which of its arguments are absent."""
    config: Any = launch.scalars.get("CONFIG")
    fields = config._asdict() if hasattr(config, "_asdict") else vars(config)
    names = {"num_warps", "num_stages", "maxnreg"} & launch.scalars.keys()
    options = {name: launch.scalars[name] for name in sorted(names)}
    given = {name: x is not None for name, x in {**launch.scalars, **launch.pointers}.items() if name != "CONFIG"}
    return {**fields, **given, **options}


def lines_of(kernels: Kernels) -> list[str]:
    """A line for each kernel: its title, where it differs from others of the title, and its first call."""
    lines = []
    for one in kernels.values():
        alike = [x.constants for x in kernels.values() if x.title == one.title]
        names = [name for name in one.constants if any(x.get(name) != one.constants[name] for x in alike)]
        differing = ", ".join(in_words(name, one.constants[name]) for name in names)
        batch, rows, keys = one.size
        of_call = f"first needed by batch {batch}, {rows} x {keys}"
        lines.append(f"{one.title}: {differing}; {of_call}" if differing else f"{one.title}: {of_call}")
    return lines


def in_words(name: str, value: Any) -> str:
    """A constant, or whether an argument is there."""
    if isinstance(value, bool):
        return f"{'with' if value else 'without'} {name}"
    return f"{name} {value}"
