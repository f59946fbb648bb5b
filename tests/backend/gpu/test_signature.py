"""Keys tell kernels apart exactly where Triton does."""

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import native_specialize_impl

from flashtile.backend.gpu.pointers import TmaDescriptor
from flashtile.backend.gpu.signature import PLAIN, SPECIALIZED, QuickKeys, argument_key, key_of
from flashtile.backend.gpu.triton_launch import for_triton

MEMORY = torch.empty(1024, dtype=torch.uint8)
INTEGERS = (0, 1, 2, 5, 16, -16, 17, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 2**62 + 1, 2**63 - 1, 2**63)
NUMBERS: tuple[Any, ...] = (None, True, False, 1.0, 0.5, float("inf"), *INTEGERS)


def pointers() -> list[Any]:
    """Tensors of several dtypes, aligned and not, and descriptors. (A box of one row is never swizzled.)"""
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8)
    found: list[Any] = [MEMORY[shift : shift + 64].view(x) for shift in (0, 8, 16) for x in dtypes]
    for dtype, box, swizzled in itertools.product(dtypes[:3], ((1, 1, 64, 64), (64, 64)), (True, False)):
        x = torch.empty(1, 1, 64, 64, dtype=dtype) if len(box) == 4 else torch.empty(64, 64, dtype=dtype)
        found.append(TmaDescriptor(x, tuple(x.shape), x.stride(), box, swizzled))
    return found


@pytest.mark.parametrize(("kind", "values"), [(SPECIALIZED, [*NUMBERS, *pointers()]), (PLAIN, NUMBERS)])
def test_keys_differ_where_triton_compiles_anew(kind: str, values: list[Any]) -> None:
    backend = make_backend(GPUTarget("cuda", 90, 32))

    def of_triton(x: Any) -> Any:
        found = native_specialize_impl(type(backend), for_triton(x), False, kind == SPECIALIZED, True)
        return found[0], found[1] if kind == SPECIALIZED or found[1] is None else None

    for a, b in itertools.combinations(values, 2):
        same = of_triton(a) == of_triton(b)
        assert (argument_key(kind, a) == argument_key(kind, b)) == same, (a, b, of_triton(a), of_triton(b))


def test_options_and_constants_are_part_of_a_key() -> None:
    parameters = [("n", PLAIN), ("TILE", "constant")]
    keys = {
        key_of(parameters, {"n": 5, "TILE": tile}, {"num_warps": warps, "num_stages": 2})
        for tile, warps in itertools.product((1, 2, "2", None), (4, 8))
    }
    assert len(keys) == 8
    assert key_of(parameters, {"n": 6, "TILE": 1}, {"num_warps": 4, "num_stages": 2}) in keys


def test_quick_keys_are_as_fine() -> None:
    parameters = [("n", PLAIN), ("x", SPECIALIZED), ("TILE", "constant")]
    quick = QuickKeys(parameters)
    known: dict[Any, str] = {}
    values = itertools.product(NUMBERS, pointers(), (1, True, None), (4, 8))
    for n, x, tile, warps in values:
        arguments, options = {"n": n, "x": x, "TILE": tile}, {"num_warps": warps}
        key = key_of(parameters, arguments, options)
        assert known.setdefault(quick.key(arguments, options), key) == key
    assert len(known) < 6000  # and not finer by values
