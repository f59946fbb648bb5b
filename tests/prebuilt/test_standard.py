"""The standard set has every kernel, and the kernels of the sweeps."""

import functools
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from forced import first, forced
from modules import PACKAGE

from flashtile.backend.gpu.kernel import Kernel, function_under_jit
from flashtile.backend.hopper import support as hopper
from flashtile.backend.hopper.plan import candidates
from flashtile.bench import sweep
from flashtile.prebuilt import launches as prebuilt
from flashtile.prebuilt.build import PINNED, key_of_launch, parameters_of
from flashtile.prebuilt.launches import device_of, devices_of, launches
from flashtile.prebuilt.standard import LEFT_OUT, StandardCall, dense, standard_calls, usual
from flashtile.prebuilt.sweeps import call_of, sweep_calls

H200 = device_of("sm_90")
MODELS = Path("benchmarks/models.toml")
OTHERS = (MODELS, *(Path(f"benchmarks/{name}.toml") for name in ("masks", "distributed", "derivatives")))
SWEEPS = sorted(x for x in Path("benchmarks").glob("*.toml") if "cpu" not in x.name and x not in OTHERS)
LEAST_COVERED = 0.95
NO_KERNELS = ("triton_kernel", "gluon_kernel")  # decorators


@pytest.fixture(autouse=True, scope="module")
def planned_for_an_archive() -> Iterator[None]:
    """Calls that differ in what a kernel does before attention have one plan, which is made once."""
    with (
        mock.patch.object(candidates, "compiler_version", return_value=PINNED),
        mock.patch.object(prebuilt, "plan_of", functools.cache(prebuilt.plan_of)),
    ):
        yield


@functools.cache
def standard_keys() -> frozenset[tuple[str, str]]:
    """Kernels and keys of the standard set, without float16, whose calls are those of bfloat16."""
    calls = [call for call in standard_calls() if dtype_of(call) is not torch.float16]
    return frozenset((x.kernel.title, key_of_launch(x)) for call in calls for x in launches(call, H200))


def dtype_of(call: StandardCall) -> torch.dtype:
    return call.arguments["q"].dtype  # type: ignore[no-any-return]


def test_calls_of_both_half_precisions() -> None:
    """Are as many, and have the same kernels, compiled for each."""
    halves = [[x for x in standard_calls() if dtype_of(x) is dtype] for dtype in (torch.bfloat16, torch.float16)]
    assert len(halves[0]) == len(halves[1]) > 1000
    for one, other in list(zip(*halves, strict=True))[::97]:
        made = [launches(call, H200) for call in (one, other)]
        assert [x.kernel.title for x in made[0]] == [x.kernel.title for x in made[1]]
        assert {*map(key_of_launch, made[0])} != {*map(key_of_launch, made[1])}


def is_covered(call: StandardCall) -> bool:
    """Kernels that are made for a formula are in no archive."""
    made = launches(call, H200)
    return all(isinstance(x.kernel, Kernel) and (x.kernel.title, key_of_launch(x)) in standard_keys() for x in made)


def test_the_sweeps_are_covered() -> None:
    """But that of models, whose kernels an archive gets by `--sweep`. A third of the calls have the share of all."""
    calls = [(cell.label(), call_of(cell)) for path in SWEEPS for cell in sweep.load(path).cells[::3]]
    assert len(calls) > 50
    missing = [label for label, call in calls if not is_covered(call)]
    print(f"{len(calls) - len(missing)} of {len(calls)} calls of the sweeps are compiled ahead; not {missing}")
    assert len(missing) <= (1 - LEAST_COVERED) * len(calls), missing


def draws(count: int) -> Iterator[StandardCall]:
    """Calls of random lengths of workloads of `benchmarks/first_calls.py`."""
    draw = random.Random(7)
    kinds = {"gqa": ((32, 8), 128, 6000, 1), "padded": ((12, 12), 64, 512, 16), "images": ((16, 16), 80, 2500, 4)}
    for _, (kind, (heads, dim, longest, most)) in itertools.product(range(count), kinds.items()):
        length, batch = draw.randint(16, longest), draw.randint(1, most)
        q, k, v = dense(heads, length, length, (dim, dim), torch.bfloat16, batch)
        mask = torch.empty(batch, 1, 1, length, dtype=torch.bool, device="meta") if kind == "padded" else None
        yield StandardCall("attention", {"q": q, "k": k, "v": v, "mask": mask, "causal": kind == "gqa"}, True)


@pytest.mark.slow
def test_random_lengths_of_usual_models() -> None:
    """Have all their kernels compiled ahead, by the plans of each chip that was measured."""
    chips = devices_of("sm_90")
    assert [chip.name.split()[1] for chip in chips] == ["H100", "H200"]
    keys = {
        (x.kernel.title, key_of_launch(x))
        for chip in chips
        for call in usual(torch.bfloat16)
        for x in launches(call, chip)
    }
    made = [x for chip in chips for call in draws(10) for x in launches(call, chip)]
    missing = {x.kernel.title for x in made if (x.kernel.title, key_of_launch(x)) not in keys | standard_keys()}
    assert len(made) > 100
    assert not missing


def test_launches_have_their_kernels_parameters() -> None:
    """Triton refuses others when it compiles, on a GPU or for an archive."""
    options = {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl"}
    calls = [x for x in standard_calls() if dtype_of(x) is not torch.float16]
    one_of_each = {x.kernel.title: x for call in calls[::5] for x in launches(call, H200)}
    for x in one_of_each.values():
        names = {name for name, _ in parameters_of(function_under_jit(x.kernel))}
        assert not {*x.scalars, *x.pointers} - names - options, x.kernel.title


def test_calls_of_a_sweep() -> None:
    """Every call for GPUs, and none with a kernel that is made for a formula."""
    calls = list(sweep_calls(MODELS))
    cells = sweep.load(MODELS).on("cuda").cells
    assert len(calls) == sum(not cell.score_mod for cell in cells) > 150
    made = [launch for call in calls for launch in launches(call, H200)]
    assert all(isinstance(launch.kernel, Kernel) for launch in made)
    assert any((x.kernel.title, key_of_launch(x)) not in standard_keys() for x in made)


def test_every_kernel_is_in_the_set_or_left_out() -> None:
    """By its name in the sources: `*_kernel` in a folder of kernels."""
    defined = set()
    for backend in ("hopper", "triton"):
        folder = PACKAGE / "backend" / backend
        for path in sorted((folder / "kernels").rglob("*.py")):
            module = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
            names = [line[4 : line.index("(")] for line in path.read_text().splitlines() if line.startswith("def ")]
            defined |= {f"{module}:{name}" for name in names if name.endswith("_kernel") and name not in NO_KERNELS}
    found = {title for title, _ in standard_keys()}
    found |= {x.kernel.title for call in list(standard_calls())[::31] for x in launches(call, device_of("sm_80"))}
    assert found <= defined
    assert defined - found == LEFT_OUT.keys()


@pytest.mark.parametrize("seqlen", [2000, 9000])
@pytest.mark.parametrize("rows", [1, None])
def test_masks_with_lists_of_blocks_and_without(seqlen: int, rows: int | None) -> None:
    q = torch.empty(2, 16, seqlen, 64, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(2, 1, rows or seqlen, seqlen, dtype=torch.bool, device="meta")
    assert is_covered(StandardCall("attention", {"q": q, "k": q, "v": q, "mask": mask}, backward=True))


def test_last_waves() -> None:
    """Of odd lengths, so that the rows of lse which a launch merges begin at an unaligned address."""
    q = torch.empty(1, 6, 20001, 96, dtype=torch.bfloat16, device="meta")
    call = StandardCall("attention", {"q": q, "k": q, "v": q}, backward=True)
    divided = first(where=lambda config: config.last_splits > 1)
    uncached = mock.patch.object(prebuilt, "plan_of", prebuilt.plan_of.__wrapped__)  # type: ignore[attr-defined]
    with forced(hopper, forward=divided, backward=divided), uncached:
        launched = [x.kernel.title.split(":")[1] for x in launches(call, H200)]
    assert (launched.count("forward_kernel"), launched.count("backward_kernel")) == (2, 2)
    assert is_covered(call)


def test_what_is_not_in_the_set() -> None:
    """So that coverage can fail."""
    q = torch.empty(1, 2, 300, 512, dtype=torch.bfloat16)
    assert not is_covered(StandardCall("attention", {"q": q, "k": q, "v": q, "softcap": 2.0, "dropout_p": 0.1}))
    q = torch.empty(1, 200, 300, 64, dtype=torch.bfloat16)
    assert is_covered(StandardCall("attention", {"q": q, "k": q, "v": q}))
    assert not is_covered(
        StandardCall("attention", {"q": q, "k": q, "v": q, "mask": torch.ones(1, 1, 300, 300) > 0, "softcap": 2.0})
    )
