"""Host time of GPU calls on a machine without one: `python benchmarks/host_parts.py [--profile]`.

Tensors of a CPU take the way of a GPU's down to the launch, whose C function does nothing. The driver's part, a GPU's
allocations and the switch to autograd's thread are missing; what Python does is all there. With Triton 3.6.
"""

import argparse
import contextlib
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtile
from flashtile.backend.gpu import launch, launcher, replay
from flashtile.backend.hopper import support as hopper
from flashtile.backend.triton import support as triton
from flashtile.call import device
from flashtile.dispatch import fast_path

H100 = device.Device("cuda", "NVIDIA H100", "sm_90", 132)
ROUNDS, CALLS, WARM = 150, 40, 20
CALLS_OF_MODELS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {  # shape of q, length of k, options
    "tiny, 1x8x64x64": ((1, 8, 64, 64), 64, {}),
    "1x8x128x64": ((1, 8, 128, 64), 128, {}),
    "nanoGPT 64x6x256x64 causal": ((64, 6, 256, 64), 256, {"causal": True}),
    "SD1.5 8x8x256x160": ((8, 8, 256, 160), 256, {}),
    "BERT4Rec 256x2x200x32": ((256, 2, 200, 32), 200, {}),
    "Decision Transformer 64x1x60x128 causal": ((64, 1, 60, 128), 60, {"causal": True}),
    "DETR cross 16x8x100x850x32": ((16, 8, 100, 32), 850, {}),
}


class Compiled(SimpleNamespace):
    """As much of a compiled kernel as a launch uses."""


def replayable(kernel: Any, programs: int, scalars: dict[str, Any], slots: Any, tensors: Any) -> Any:
    """The step of a launch by Triton's C function, with one that does nothing."""
    given = {name: None if slot is None else slot.resolve(tensors) for name, slot in slots.items()}
    run = SimpleNamespace(launch_cooperative_grid=False, launch_pdl=False)
    maps = [x for x in given.values() if x is not None and not isinstance(x, Tensor)]
    metadata = SimpleNamespace(tensordesc_meta=[None] * len(maps))
    compiled = Compiled(run=run, function=0, packed_metadata=None, metadata=metadata)
    step = launcher.Launcher(nothing, compiled, programs, scalars | given, slots, nothing)
    step.title = str(kernel)
    return step


def nothing(*_: Any) -> None:
    return None


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    patches = [
        mock.patch.object(device, "_describe", lambda *_: H100),
        mock.patch.object(device, "host_readable", lambda _: False),
        mock.patch.object(fast_path, "state_of_process", lambda q: fast_path._ENVIRONMENT.get(fast_path._BACKEND)),
        mock.patch.object(hopper, "unusable", lambda: None),
        mock.patch.object(triton, "unusable", lambda: None),
        mock.patch.object(launch, "launch", nothing),
        mock.patch.object(replay, "launch", nothing),
        mock.patch.object(replay, "replayable", replayable),
        mock.patch.object(launcher, "make_tensordesc_arg", lambda *_: [0]),
        mock.patch.object(
            launcher.driver, "_active", SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 7)
        ),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def microseconds(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls * 1e6


class Empty(torch.autograd.Function):
    """A function that allocates its result, and returns the gradient of it for each input."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return dout, dout, dout


def runs_of(function: Callable[..., Tensor], shape: tuple[int, ...], keys: int, options: Any) -> dict[str, Any]:
    batch, heads, _, width = shape
    q = torch.empty(shape, dtype=torch.bfloat16)
    k, v = (torch.empty(batch, heads, keys, width, dtype=torch.bfloat16) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dout = torch.empty_like(q)

    def forward() -> Tensor:
        return function(q, k, v, **options)

    def with_gradients() -> Tensor:
        return function(*leaves, **options)

    for _ in range(3):
        out = with_gradients()

    def backward() -> Any:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return {"forward": forward, "with gradients": with_gradients, "backward": backward}


def launches() -> list[str]:
    found = []
    for known in (*fast_path._recent.values(),):
        for one in (known.forward, *known.backward.values()):
            recording = [c.cell_contents for c in (one.replay.__closure__ or ())] if one.replay else []
            for r in recording:
                if isinstance(r, replay.Recording):
                    found.append([getattr(s, "title", s.__qualname__.split(".")[0] if hasattr(s, "__qualname__") else str(s)).split("name='")[-1] for s in r.steps])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with as_on_a_gpu():
        floor = runs_of(lambda q, k, v: Empty.apply(q, k, v), (1, 8, 64, 64), 64, {})
        runs = {f"floor, {name}": run for name, run in floor.items()}
        for name, (shape, keys, options) in CALLS_OF_MODELS.items():
            if given.only in name:
                fast_path.forget()
                few = (min(shape[0], 2), *shape[1:])
                for kind, run in runs_of(flashtile.attention, few, keys, options).items():
                    runs[f"{name}, {kind}"] = run
                    microseconds(run, WARM)
                if given.steps:
                    for steps in launches():
                        print(name, len(steps), steps)
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                found[name].append(microseconds(run, CALLS))
        for name, times in found.items():
            print(f"{name}: {min(times):.1f} us (median {statistics.median(times):.1f})")
        if given.profile:
            for name, run in runs.items():
                if given.profile in name:
                    profile = cProfile.Profile()
                    profile.enable()
                    microseconds(run, 2000)
                    profile.disable()
                    print(name)
                    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
