"""The forward kernel with tangents in Triton's interpreter, against the fp64 oracle (see `test_interpreted.py`)."""

import contextlib
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from checking import dense_case, features
from packing import packed_case
from variants import VARIANTS

import flashtile
from flashtile.backend.gpu import replay
from flashtile.backend.triton.launch import tangents as launch
from flashtile.testing.case import Case
from flashtile.testing.generate import random_case
from flashtile.testing.moving import moving
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities that the contract allows
]
LENGTHS = (1, 15, 17, 33)
CHOSEN = (
    "hdim 64 causal", "hdim 96", "fp32", "fp32 everything", "top left", "window", "softcap", "bias",
    "bias of heads and keys", "mask", "slopes", "sinks", "dropout", "packed window", "packed everything", "paged",
    "packed chunks, rows unused",
)  # fmt: skip


def assert_right(case: Case) -> None:
    with poisoned_allocation(), flashtile.calls() as counts:
        results = case.run("triton")
    assert [(row.direction, row.backend) for row in counts.rows] == [("tangents", "triton")]
    wrong = [str(x) for x in compare(results, case, solve(case)) if not x.ok]
    assert not wrong, "\n".join([case.description, *wrong])


@pytest.mark.parametrize("name", CHOSEN)
def test_variants(name: str) -> None:
    variant = VARIANTS[name]
    variant = replace(variant, dtype=torch.float32 if variant.dtype is torch.float32 else torch.float16)
    variant = replace(variant, head_dim=min(variant.head_dim, 96), heads=(2, 1) if "everything" in name else (4, 2))
    assert_right(moving(variant.case(2, "cpu", LENGTHS)))


@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("q", "v"), ("bias",), ("sinks",), ("alibi_slopes",)])
def test_what_stands_still_costs_nothing(names: tuple[str, ...]) -> None:
    """Each input alone, and with others: products of the rest are not in the kernel."""
    given = {"bias": torch.randn(1, 2, 7, 9), "sinks": torch.randn(2), "alibi_slopes": torch.rand(2)}
    assert_right(moving(dense_case(batch=1, causal=True, **given), names))


@pytest.mark.parametrize("name", ["score_mod", "mask function"])
def test_functions(name: str) -> None:
    assert_right(moving(dense_case(batch=1, causal=True, **features()[name])))
    if name == "score_mod":  # its tensors alone
        case = dense_case(batch=1, **features()[name])
        assert_right(moving(case, [x for x in case.differentiable() if x.startswith("score_mod")]))


def test_rows_that_are_not_in_use() -> None:
    assert_right(moving(packed_case(seqused_q=torch.tensor([2, 0, 3, 5], dtype=torch.int32))))


@pytest.mark.parametrize("seed", [4, 6, 10])
def test_random_problems(seed: int) -> None:
    assert_right(moving(random_case(seed, dtypes=(torch.float16, torch.float32), function="attention")))


@pytest.mark.parametrize("left", [0, 3])
def test_a_part_of_a_larger_call(left: int) -> None:
    """Keys that no row sees, and rows that see no key."""
    assert_right(
        moving(dense_case(batch=1, seqlen_q=9, seqlen_k=5, window=(left, -2), sinks=torch.tensor([0.5, -1.0])))
    )


def test_a_repeated_call_is_replayed() -> None:
    """Planned, recorded, then replayed without host code: for other values, and for each set of inputs that move."""
    for seed in range(4):
        for names in (("q",), ("q", "k", "v")):
            torch.manual_seed(seed)
            case = moving(dense_case(batch=1, causal=True), names)
            with contextlib.ExitStack() as patches:
                if seed > 1:
                    patches.enter_context(mock.patch.object(replay, "Recorder", side_effect=AssertionError))
                assert_right(case)


@pytest.mark.parametrize("num_splits", [2, 3])
@pytest.mark.parametrize("name", ["hdim 64 causal", "window", "bias", "sinks", "dropout", "mask", "packed everything"])
def test_programs_share_the_keys_of_a_tile(name: str, num_splits: int) -> None:
    """Some splits have no block, and some rows no key."""
    variant = replace(VARIANTS[name], dtype=torch.float32 if name == "window" else torch.float16)
    variant = replace(variant, head_dim=min(variant.head_dim, 32), heads=(2, 1))
    case = variant.case(num_splits, "cpu", (17, 33))
    with mock.patch.object(launch, "new_semaphores", wraps=launch.new_semaphores) as shared:
        assert_right(moving(replace(case, arguments=case.arguments | {"num_splits": num_splits})))
    assert shared.called
