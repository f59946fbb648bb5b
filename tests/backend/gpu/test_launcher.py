"""Launches by `backend.gpu.launcher` give Triton's C function what Triton itself would give it."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from flashtile.backend.gpu.installed import triton_version

if triton_version() != (3, 6):
    pytest.skip("the launcher of Triton 3.6", allow_module_level=True)

from triton import knobs
from triton.backends.nvidia import driver as nvidia

from flashtile.backend.gpu import launcher
from flashtile.backend.gpu.pointers import Part, Slot, resolved
from flashtile.backend.gpu.triton_launch import TritonLaunch

BASE = ("function", False, False, None, None, (4, 1, 0), None, None, None)


def gpu() -> Any:
    """A driver whose current stream is 7."""
    active = SimpleNamespace(get_current_device=lambda: 1, get_current_stream={1: 7}.get)
    return mock.patch.object(launcher.driver, "_active", active)


def descriptor(x: torch.Tensor, rows: int) -> Any:
    return SimpleNamespace(base=x, shape=list(x.shape), strides=list(x.stride()), padding="zero", rows=rows)


def map_of(x: Any, layout: Any) -> list[Any]:
    """Result of `make_tensordesc_arg`, with the tensor map in words."""
    return [f"map of {x.base.data_ptr()} in {x.rows} rows, {layout}", *x.shape, *x.strides]


class Compiled:
    """As much of Triton's compiled kernel as launches use. `given` records what its C function is called with."""

    def __init__(self, signature: dict[int, str], layouts: list[Any]):
        self.given: list[tuple[Any, ...]] = []
        run = object.__new__(nvidia.CudaLauncher)
        run.launch = nvidia.wrap_handle_tensordesc(lambda *x: self.given.append(x), signature, layouts)
        run.global_scratch_size = run.profile_scratch_size = 0
        run.launch_cooperative_grid = run.launch_pdl = False
        run.num_ctas = 1
        self.run = run
        self.function, self.packed_metadata = "function", (4, 1, 0)
        self.metadata = SimpleNamespace(tensordesc_meta=layouts)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *x: self.run.launch(*grid, 7, *BASE, *x)  # as CompiledKernel's


@pytest.mark.parametrize("with_descriptors", [False, True])
def test_arguments(with_descriptors: bool) -> None:
    names = {"q": "*bf16", "n": "i32", "TILE": "constexpr", "lse": "*fp32", "absent": "constexpr"}
    layouts = ["layout of k", "layout of v"] if with_descriptors else []
    if with_descriptors:
        names = {"k_desc": "tensordesc<bf16[1, 4]>", **names, "v_desc": "tensordesc<bf16[1, 4]>"}
    compiled = Compiled(dict(enumerate(names.values())), layouts)

    parts = [Part(offset, (4, 8), torch.float32) for offset in (128, 256)]
    slots = {"q": Slot(0), "lse": Slot(1, part=parts[0]), "absent": None}
    if with_descriptors:
        slots |= {"k_desc": Slot(2, descriptor, 2), "v_desc": Slot(1, descriptor, 4, parts[1])}

    def tensors() -> list[torch.Tensor | None]:
        workspace = torch.zeros(parts[-1].end, dtype=torch.uint8)
        return [torch.randn(4, 8), workspace, torch.randn(4, 8)]

    first = tensors()
    pointers = resolved(slots, first)
    arguments = {"n": 5, "TILE": "tile"} | pointers
    arguments = {name: arguments[name] for name in names}
    by_triton = TritonLaunch(compiled, 12, arguments, slots)
    made = mock.patch.object(nvidia, "make_tensordesc_arg", side_effect=map_of)
    made_here = mock.patch.object(launcher, "make_tensordesc_arg", side_effect=map_of)
    with made, made_here as maps, gpu():
        launch = launcher.of(compiled, 12, arguments, slots, by_triton)
        assert isinstance(launch, launcher.Launcher)
        others = tensors()
        for given in (first, others, others, first):
            launch(given)
            by_triton(given)
            ours, theirs = compiled.given[-2:]
            assert ours == tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in theirs)
        assert maps.call_count == 2 * len(layouts)  # once for each address


def test_a_profiler_s_hooks_are_left_to_triton() -> None:
    compiled = Compiled({0: "*fp32"}, [])
    x = torch.randn(4)
    by_triton = mock.Mock()
    with gpu():
        launch = launcher.of(compiled, 1, {"x": x}, {"x": Slot(0)}, by_triton)
    assert launch is not None
    hook = mock.Mock()
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch([x])
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert by_triton.call_count == 1
    assert compiled.given == []


def test_what_needs_scratch_memory_is_left_to_triton() -> None:
    compiled = Compiled({0: "*fp32"}, [])
    compiled.run.global_scratch_size = 128
    x = torch.randn(4)
    assert launcher.of(compiled, 1, {"x": x}, {"x": Slot(0)}, mock.Mock()) is None
