"""Lists of the blocks that a mask shows, in the Hopper kernels on a GPU:

    pytest -m gpu tests/backend/hopper/test_hopper_lists_gpu.py

A barrier that is never signaled hangs: a test that takes too long ends the process and prints the stack.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from checking import dense_case
from torch import Tensor

from flashtile.backend.gpu.kernel import function_under_jit
from flashtile.backend.gpu.replay import Recorder
from flashtile.backend.hopper import support
from flashtile.backend.hopper.plan import listed
from flashtile.dispatch import fast_path
from flashtile.testing.case import Case, MaskFunction
from flashtile.testing.oracle import Expected, solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(support.unusable() is not None, reason=f"{support.unusable()}"),
    pytest.mark.usefixtures("watchdog", "lists_for_all_calls"),
]
S = 700  # rows and keys at most
UNSEEN = 512  # the first key of the blocks of any kernel that no row sees under `first_keys`
LIST_KERNELS = ["mask_states_kernel", "visible_blocks_kernel", "key_lists_kernel"]


@pytest.fixture
def lists_for_all_calls() -> Iterator[None]:
    fast_path.forget()
    with mock.patch.multiple(listed, LEAST_PAIRS=0, LEAST_MASK_PAIRS=0):
        yield
    fast_path.forget()


# Masks ----------------------------------------------------------------------------------------------------------------


def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor, ids: Tensor) -> Tensor:
    return ids[b, i] == ids[b, j]


def causal_window(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Tensor) -> Tensor:
    """By a tensor, for which no window of the call stands."""
    return (j <= i + offset) & (i - j <= 190 + offset)


def prefix(b: Tensor, h: Tensor, i: Tensor, j: Tensor, lengths: Tensor) -> Tensor:
    return (j < lengths[b]) | (j <= i)


def dilated(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ((i - j).abs() <= 260) & ((i - j).abs() % 5 == b)


def arbitrary(b: Tensor, h: Tensor, i: Tensor, j: Tensor, visible: Tensor) -> Tensor:
    """An element for each pair and head."""
    return visible[h, i, j]


def first_keys(b: Tensor, h: Tensor, i: Tensor, j: Tensor, width: Tensor) -> Tensor:
    """Rows from 450 on see no key, and keys from 250 on are seen by no row. Heads of a group differ."""
    return (i < 450) & (j < 250) & ((i - j).abs() >= width[h])


def ids(device: str, size: int = 130) -> Tensor:
    """Sorted ids of the documents of two sequences."""
    return torch.stack([torch.arange(S) // size, (torch.arange(S) + 40) // (size // 2)]).int().to(device)


def table(device: str) -> Tensor:
    """Visible pairs of four heads, without some blocks, and with some rows that see nothing."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.rand(4, -(-S // 64), -(-S // 64), generator=generator) < 0.4
    visible = blocks.repeat_interleave(64, 1).repeat_interleave(64, 2)[:, :S, :S]
    full = torch.rand(4, -(-S // 64), 1, generator=generator) < 0.5
    some = torch.rand(4, S, S, generator=generator) < 0.7
    return (visible & (some | full.repeat_interleave(64, 1)[:, :S])).to(device)


MASKS: dict[str, Callable[[str], MaskFunction | Tensor]] = {
    "documents": lambda device: MaskFunction(documents, (ids(device),)),
    "causal_window": lambda device: MaskFunction(causal_window, (torch.tensor(0, device=device),)),
    "prefix": lambda device: MaskFunction(prefix, (torch.tensor([300, 17], device=device),)),
    "dilated": lambda device: MaskFunction(dilated),
    "arbitrary": lambda device: MaskFunction(arbitrary, (table(device),)),
    "tensor": lambda device: table(device)[None],
    "padding": lambda device: torch.arange(S, device=device) < torch.tensor([[[[300]]], [[[17]]]], device=device),
    "first_keys": lambda device: MaskFunction(first_keys, (torch.tensor([0, 140, 220, 0], device=device),)),
}


# Calls ----------------------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A call with a mask function."""

    mask: str
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    heads: tuple[int, int] = (4, 2)
    deterministic: bool = False
    window: tuple[int | None, int | None] | None = None  # causal is (None, 0)


FP16 = torch.float16
PROBLEMS = [
    Problem("documents", 64),
    Problem("documents", 128),
    Problem("documents", 64, FP16, deterministic=True),
    Problem("documents", 128, FP16, (4, 4)),
    Problem("causal_window", 64, FP16, (4, 1)),
    Problem("causal_window", 128),
    Problem("prefix", 64),
    Problem("prefix", 128, FP16, deterministic=True),
    Problem("dilated", 64, heads=(2, 2)),
    Problem("dilated", 128, FP16),
    Problem("dilated", 96),
    Problem("arbitrary", 64),
    Problem("arbitrary", 128, FP16),
    Problem("tensor", 64),
    Problem("tensor", 128, FP16, deterministic=True),
    Problem("padding", 64, FP16),
    Problem("padding", 128),
    Problem("first_keys", 64, FP16),
    Problem("first_keys", 128),
    Problem("first_keys", 128, deterministic=True),
    Problem("documents", 64, window=(None, 0)),
    Problem("documents", 128, FP16, deterministic=True, window=(None, 0)),
    Problem("dilated", 64, window=(200, 130)),
    Problem("tensor", 128, window=(None, 0)),
    Problem("padding", 64, window=(300, 0)),
]
LENGTHS = ((643, S), (S, 513), (257, 391))


def name_of(problem: Problem) -> str:
    words = [problem.mask, str(problem.head_dim), str(problem.dtype).removeprefix("torch."), f"heads {problem.heads}"]
    window = [] if problem.window is None else [f"window {problem.window}"]
    return " ".join([*words, *window, *["deterministic"] * problem.deterministic])


def case_of(problem: Problem, lengths: tuple[int, int], device: str) -> Case:
    case = dense_case(
        num_heads_q=problem.heads[0], num_heads_kv=problem.heads[1], seqlen_q=lengths[0], seqlen_k=lengths[1],
        head_dim=problem.head_dim, dtype=problem.dtype, seed=sum(lengths),
    )  # fmt: skip
    assert case.dout is not None
    assert case.dlse is not None
    mask = MASKS[problem.mask](device)
    if isinstance(mask, Tensor):
        mask = mask[:, :, : lengths[0], : lengths[1]]
    arguments = {name: x.to(device) for name, x in case.arguments.items()}
    arguments |= {"mask": mask, "window": problem.window}
    dout, dlse = case.dout.to(device), case.dlse.to(device)
    return replace(case, arguments=arguments, dout=dout, dlse=dlse, description="")


@contextmanager
def watched_launches() -> Iterator[dict[str, bool]]:
    """Kernels that are launched or recorded, by name, and whether they get lists."""
    launched: dict[str, bool] = {}
    launch = Recorder.launch

    def watched(self: Recorder, kernel: Any, pointers: dict[str, Any], *arguments: Any) -> None:
        function: Any = function_under_jit(kernel)
        launched[getattr(function, "fn", function).__name__] = pointers.get("lists") is not None
        launch(self, kernel, pointers, *arguments)

    with mock.patch.object(Recorder, "launch", watched):
        yield launched


def results_of(case: Case, problem: Problem) -> dict[str, Tensor]:
    """Results of kernels that have lists. Keys are not split, since splits have none."""
    return case.run("hopper", num_splits=1, deterministic=problem.deterministic)


def require_lists(launched: dict[str, bool], problem: Problem) -> None:
    """Fail unless forward and backward got lists, for which a mask that is a tensor was read."""
    assert launched["forward_kernel"]
    assert launched["backward_kernel"]
    assert [name in launched for name in LIST_KERNELS] == [problem.mask in ("tensor", "padding"), True, True]


def wrong(results: dict[str, Tensor], case: Case, expected: dict[str, Expected]) -> list[str]:
    """Results outside of their error bounds."""
    found = compare({name: x.cpu() for name, x in results.items()}, case, expected)
    return [f"{case.description}\n  {x}" for x in found if not x.ok]


@pytest.mark.parametrize("problem", PROBLEMS, ids=name_of)
def test_within_the_bound(problem: Problem) -> None:
    """NaN in blocks of keys that no row sees never shows."""
    failures = []
    for lengths in LENGTHS:
        case = case_of(problem, lengths, "cuda")
        expected = solve(case)
        if problem.mask == "first_keys":
            for x in "kv":
                case.arguments[x][:, :, UNSEEN:] = torch.nan
        with watched_launches() as launched, poisoned_allocation():
            results = results_of(case, problem)
        require_lists(launched, problem)
        failures += wrong(results, case, expected)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_captured_tensor_that_changes_between_calls(head_dim: int) -> None:
    """The first call of a layout plans, the second one records, and later ones replay."""
    problem = Problem("documents", head_dim)
    case = case_of(problem, LENGTHS[0], "cuda")
    captured = case.arguments["mask"].tensors[0]
    for call, size in enumerate((130, 300, 37, S, 64)):
        captured.copy_(ids("cuda", size))
        with watched_launches() as launched:
            results = results_of(case, problem)
        if call < 2:
            require_lists(launched, problem)
        else:
            assert not launched
        assert wrong(results, case, solve(case)) == []


@pytest.mark.parametrize(
    "problem",
    [Problem("documents", 64), Problem("documents", 128), Problem("arbitrary", 64), Problem("tensor", 64)],
    ids=name_of,
)
def test_a_captured_tensor_that_changes_inside_a_graph(problem: Problem) -> None:
    case = case_of(problem, LENGTHS[0], "cuda")
    mask = case.arguments["mask"]
    captured = mask if isinstance(mask, Tensor) else mask.tensors[0]
    within_graph = (
        case if isinstance(mask, Tensor) else replace(case, arguments=case.arguments | {"mask": mask.public()})
    )
    with torch.cuda.stream(torch.cuda.Stream()), watched_launches() as launched:
        for _ in range(3):
            results_of(within_graph, problem)
    require_lists(launched, problem)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = results_of(within_graph, problem)
    for size in (64, 300, 37):
        captured.copy_(ids("cuda", size) if problem.mask == "documents" else captured.roll(size, -1))
        graph.replay()
        assert wrong(results, case, solve(case)) == []
