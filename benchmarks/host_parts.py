"""Host time of GPU calls without a GPU: `python benchmarks/host_parts.py`, with Triton 3.6.

CPU tensors take the way of a GPU's down to Triton's C function, in whose place one does nothing. The driver's part, a
GPU's allocations and autograd's own thread are missing; Python is all there. Least means of the rounds, as other
processes only add. `--steps` prints what recordings repeat, `--profile backward` the functions of those calls.
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import flashtile
from flashtile.backend.gpu import launcher, replay
from flashtile.backend.hopper import support as hopper
from flashtile.backend.triton import support as triton
from flashtile.call import device
from flashtile.dispatch import fast_path

ROUNDS, CALLS = 150, 40
H100 = device.Device("cuda", "NVIDIA H100", "sm_90", 132)
SHAPES: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {  # of q, number of keys, options
    "64 rows": ((1, 8, 64, 64), 64, {}),
    "128 rows": ((1, 8, 128, 64), 128, {}),
    "Stable Diffusion 1.5, 16 x 16": ((2, 8, 256, 160), 256, {}),
    "BERT4Rec": ((2, 2, 200, 32), 200, {}),
    "DETR, cross-attention": ((2, 8, 100, 32), 850, {}),
}


class Step(launcher.Launcher):
    """A launch that starts nothing."""

    def __init__(self, kernel: Any, programs: int, scalars: dict[str, Any], slots: Any, tensors: list[Tensor | None]):
        arguments = {name: None if slot is None else slot.resolve(tensors) for name, slot in slots.items()}
        maps = [x for x in arguments.values() if x is not None and not isinstance(x, Tensor)]
        run = SimpleNamespace(launch_cooperative_grid=False, launch_pdl=False)
        metadata = SimpleNamespace(tensordesc_meta=[None] * len(maps))
        compiled = SimpleNamespace(run=run, function=0, packed_metadata=None, metadata=metadata)
        super().__init__(nothing, compiled, programs, scalars | arguments, slots, nothing)
        self.__qualname__ = kernel.name


def nothing(*_: Any) -> None:
    return None


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 7)
    with ExitStack() as stack:
        for owner, name, substitute in (
            (device, "_describe", lambda *_: H100),
            (device, "host_readable", lambda _: False),
            (fast_path, "state_of_process", lambda _: fast_path._ENVIRONMENT.get(fast_path._BACKEND)),
            (hopper, "unusable", nothing),
            (triton, "unusable", nothing),
            (replay, "launch", nothing),
            (replay, "replayable", Step),
            (launcher, "make_tensordesc_arg", lambda *_: [0]),
            (launcher.driver, "_active", driver),
        ):
            stack.enter_context(mock.patch.object(owner, name, substitute))
        yield


def microseconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    return (time.perf_counter() - start) / CALLS * 1e6


class Floor(torch.autograd.Function):
    """A function that allocates its result, and returns the gradient of that for each input."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return dout, dout, dout


def runs_of(
    attend: Callable[..., Tensor], shape: tuple[int, ...], keys: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Forward, with gradients, and backward; each has been recorded."""
    batch, heads, _, width = shape
    q, dout = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.empty(batch, heads, keys, width, dtype=torch.bfloat16) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for _ in range(3):  # checked, recorded, repeated
        out = attend(*leaves, **options)
    runs = {
        "forward": lambda: attend(q, k, v, **options),
        "with gradients": lambda: attend(*leaves, **options),
        "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
    }
    for run in runs.values():
        microseconds(run)
    return runs


def steps() -> Iterator[str]:
    """The steps of all recordings so far."""
    for entry in (x for x in fast_path.table.recent.values() if isinstance(x, fast_path.Entry)):
        for one in (entry.forward, *(x for passes in entry.backward.values() for x in passes)):
            if one.recording is not None:
                yield ", ".join(step.__qualname__.split(".")[0] for step in one.recording.steps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default="")
    parser.add_argument("--steps", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with as_on_a_gpu():
        runs = {
            f"{name}, {kind}": run
            for name, x in SHAPES.items()
            for kind, run in runs_of(flashtile.attention, *x).items()
        }
        runs |= {f"autograd.Function, {kind}": run for kind, run in runs_of(Floor.apply, *SHAPES["64 rows"]).items()}
        for line in steps() if given.steps else ():
            print(line)
        least = dict.fromkeys(runs, float("inf"))
        for _ in range(ROUNDS):
            for name, run in runs.items():
                least[name] = min(least[name], microseconds(run))
        for name, time_of_call in least.items():
            print(f"{name}: {time_of_call:.1f} us")
        for name, run in runs.items() if given.profile else ():
            if given.profile in name:
                with cProfile.Profile() as profile:
                    for _ in range(50):
                        microseconds(run)
                print(name)
                pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
