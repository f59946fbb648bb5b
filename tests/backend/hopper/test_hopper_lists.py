"""Lists of the blocks that a mask function shows, in the Hopper kernels without a GPU: emulated, with planted bugs."""

import functools
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from checking import dense_case
from gluon_emulation.backend import FOLDER, copy_with_mistake, emulated, emulated_kernels
from gluon_emulation.machine import EmulationError
from hopper_score_mods import decay, with_score_mod
from hopper_variants import tiles_of, with_tiles
from listed_masks import UNSEEN, dilated, documents, earlier, far_by_head

from flashtile import MaskMod, mask_mods, score_mods
from flashtile.api.explain import described_call
from flashtile.backend.gpu.replay import Recorder
from flashtile.call.call import Tensors
from flashtile.expression.blocks import FULL, SUMMARY_BLOCK
from flashtile.testing.case import Case, MaskFunction
from flashtile.testing.oracle import Expected, solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.usefixtures("one_thread")
LIST_KERNELS = {"mask_states_kernel", "visible_blocks_kernel", "key_lists_kernel", "pair_bits_kernel"}
IDS = torch.repeat_interleave(torch.tensor([3, 8, 9, 4]), torch.tensor([130, 71, 180, 219]))


class Problem(NamedTuple):
    """A call with a mask function."""

    mask: MaskFunction
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    heads: tuple[int, int] = (2, 2)
    deterministic: bool = False
    score_mod: Any = None
    window: Any = None  # causal is (None, 0)
    batch: int = 1


BY_HEAD = MaskFunction(far_by_head, (torch.tensor([0, 140, 220, 0]),))
PROBLEMS = {
    "documents 64": Problem(MaskFunction(documents, (IDS,)), 64, 385, 385),
    "documents 128": Problem(MaskFunction(documents, (IDS,)), 128, 330, 400),
    "earlier 96": Problem(MaskFunction(earlier, (torch.tensor(0),)), 96, 300, 333),
    "heads of groups 64": Problem(BY_HEAD, 64, 385, 401, (4, 2)),
    "heads of groups 128": Problem(BY_HEAD, 128, 270, 401, (4, 2), deterministic=True),
    "dilated, decay 64": Problem(MaskFunction(dilated), 64, 257, 300, score_mod=decay, batch=2),
    "documents, causal 64": Problem(MaskFunction(documents, (IDS,)), 64, 513, 401, window=(None, 0)),
    "heads, window 128": Problem(BY_HEAD, 128, 300, 401, (4, 2), deterministic=True, window=(150, 90)),
}


def case_of(problem: Problem) -> Case:
    heads_q, heads_k = problem.heads
    case = dense_case(
        batch=problem.batch, num_heads_q=heads_q, num_heads_kv=heads_k, seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k, head_dim=problem.head_dim, dtype=torch.bfloat16,
    )  # fmt: skip
    if problem.score_mod is not None:
        case = with_score_mod(problem.score_mod, case, 0, "cpu")
    return replace(case, arguments=case.arguments | {"mask": problem.mask, "window": problem.window}, description="")


def run(
    case: Case, problem: Problem, folder: Path = FOLDER, *, reads_mask: bool = True, bits: bool = True
) -> dict[str, Tensor]:
    """Results with lists of blocks; a mask that is a tensor is read for them, once. With `bits`, those of pairs if the
    mask is the same for all heads.
    """
    package = str(emulated_kernels(folder).__package__)
    lists = importlib.import_module(f"{package}.plan.listed")
    cores = 1 if problem.deterministic else 3  # one program waits forever for what it takes later
    with (
        mock.patch.multiple(lists, LEAST_PAIRS=0, LEAST_MASK_PAIRS=0),
        emulated(cores, 0, folder) as launched,
        poisoned_allocation(),
    ):
        results = case.run("hopper", deterministic=problem.deterministic)
    kernels = [name for name in launched if name in LIST_KERNELS]
    states = ["mask_states_kernel"] * (reads_mask and isinstance(case.arguments["mask"], Tensor))
    of_pairs = ["pair_bits_kernel"] * (bits and has_bits(problem, case))
    of_rows, of_keys = ["visible_blocks_kernel", *of_pairs], ["visible_blocks_kernel", "key_lists_kernel", *of_pairs]
    assert kernels == [*states, *of_rows, *of_keys]
    return results


def has_bits(problem: Problem, case: Case) -> bool:
    """Whether pairs of partly visible blocks are bits: of masks that are the same for all heads."""
    mask = case.arguments["mask"]
    of_heads = mask.shape[1] > 1 if isinstance(mask, Tensor) else mask.fn is far_by_head
    return not of_heads and problem.score_mod is None


def wrong(name: str, folder: Path = FOLDER) -> list[str]:
    """Results outside of their error bounds. Keys in blocks that no row sees are NaN."""
    problem = PROBLEMS[name]
    case, solution = case_of(problem), solution_of(problem)
    if problem.mask is BY_HEAD:
        for x in ("k", "v"):
            poisoned = case.arguments[x].clone()
            poisoned[:, :, UNSEEN:] = torch.nan
            case = replace(case, arguments=case.arguments | {x: poisoned})
    return [str(x) for x in compare(run(case, problem, folder), case, solution) if not x.ok]


@functools.cache
def solution_of(problem: Problem) -> dict[str, Expected]:
    return solve(case_of(problem))


@pytest.mark.parametrize("name", PROBLEMS)
def test_within_the_bound(name: str) -> None:
    assert wrong(name) == []


@pytest.mark.parametrize("num_warpgroups", [1, 3])
def test_other_tiles(num_warpgroups: int) -> None:
    """Lists and bits of 64 rows and keys, and of 192 rows."""
    with with_tiles(tiles_of(num_warpgroups)):
        assert wrong("documents, causal 64") == []


def test_long_calls_have_no_bits() -> None:
    """Kernels call the mask's function where bits would take more memory."""
    problem = PROBLEMS["documents 64"]
    case = case_of(problem)
    with mock.patch.object(importlib.import_module(f"{emulated_kernels().__package__}.plan.listed"), "MOST_BITS", 0):
        results = run(case, problem, bits=False)
    assert [str(x) for x in compare(results, case, solution_of(problem)) if not x.ok] == []


@pytest.mark.parametrize(
    ("head_dim", "heads", "lengths", "broadcast"),
    [(128, 4, (270, 401), ()), (96, 1, (300, 513), (2,))],
)
def test_a_mask_that_is_a_tensor(
    head_dim: int, heads: int, lengths: tuple[int, int], broadcast: tuple[int, ...]
) -> None:
    """An element for each pair and head; or for each key, with other features. Blocks of keys without a row are NaN."""
    width = torch.tensor([0, 140, 220, 0] if heads == 4 else [0])
    b, h = torch.arange(2)[:, None, None, None], torch.arange(min(heads, len(width)))[:, None, None]
    i, j = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    mask = far_by_head(b, h, i, j, width) & (b + j % 7 > 0)
    for dim in broadcast:
        mask = mask.any(dim, keepdim=True)
    problem = Problem(MaskFunction(documents), head_dim, *lengths, (4, 2), deterministic=heads == 4, batch=2)
    case = case_of(problem)
    generator = torch.Generator().manual_seed(0)
    others = {"bias": torch.randn(1, 4, *lengths, generator=generator).bfloat16(), "softcap": 3.0} if broadcast else {}
    arguments = case.arguments | {"mask": mask} | others
    case = replace(case, arguments=arguments, constant=("bias",), description="")
    solution = solve(case)
    for x in "kv":
        case.arguments[x][:, :, UNSEEN:] = torch.nan
    results = run(case, problem)
    assert [str(x) for x in compare(results, case, solution) if not x.ok] == []


def test_full_blocks_do_not_read_the_mask() -> None:
    """A mask whose lists say that all its blocks are full, although it hides pairs: they stay visible."""
    problem = Problem(MaskFunction(documents, (IDS,)), 64, 256, 256)
    case = case_of(problem)
    mask = torch.rand((1, 1, 256, 256), generator=torch.Generator().manual_seed(0)) < 0.5
    case = replace(case, arguments=case.arguments | {"mask": mask})
    lists = importlib.import_module(f"{emulated_kernels().__package__}.launch.block_lists")
    with mock.patch.object(lists, "states_of_mask", side_effect=all_full):
        results = run(case, problem, reads_mask=False)
    del case.arguments["mask"]
    assert [str(x) for x in compare(results, case, solve(case)) if not x.ok] == []


def all_full(recorder: Recorder, mask: Tensor) -> Tensor:
    blocks = -(-mask.shape[2] // SUMMARY_BLOCK), -(-mask.shape[3] // SUMMARY_BLOCK)
    return recorder.op(lambda: torch.full((1, 1, *blocks), FULL, dtype=torch.uint8))


def test_keys_after_the_last_one_in_full_blocks() -> None:
    """Scores are so small that exponentials of zeros, which stand for keys after the last one, are infinite."""
    problem = Problem(MaskFunction(lambda b, h, i, j: (j < 100) | (i >= 400)), 64, 513, 321)
    case = case_of(problem)
    generator = torch.Generator().manual_seed(0)
    for name, mean in (("q", 8.0), ("k", -3.0)):
        x = case.arguments[name]
        x.copy_(mean + 0.05 * torch.randn(x.shape, generator=generator))
    assert [str(x) for x in compare(run(case, problem), case, solve(case)) if not x.ok] == []


def test_a_score_mod_with_a_mask_that_is_a_tensor_has_no_lists() -> None:
    """Kernels with lists take the blocks of a score_mod in the order of lists, not by distance."""
    mask = torch.ones(1, 1, 300, 300, dtype=torch.bool)
    q = torch.empty(1, 2, 300, 64, dtype=torch.bfloat16)
    lists = importlib.import_module(f"{emulated_kernels().__package__}.plan.listed")
    with mock.patch.object(lists, "LEAST_MASK_PAIRS", 0):
        for arguments, found in (({}, True), ({"score_mod": score_mods.alibi(torch.rand(2))}, False)):
            call = described_call(q, q, q, None, None, {"mask": mask, **arguments})
            assert lists.has_lists(call) == found


# Lists of the kernels and of torch operations -------------------------------------------------------------------------

SORTED = torch.sort(torch.randint(0, 9, (2, 260), generator=torch.Generator().manual_seed(0)))[0]
REALS = torch.tensor([1.0, 2.0, torch.nan, 0.0]).repeat_interleave(65)
MASKS = {
    "causal": mask_mods.causal(torch.tensor(0)),
    "window with an offset": mask_mods.window(30, 40, torch.tensor(-3)),
    "prefix": mask_mods.prefix(torch.tensor([90, 17])),
    "documents": mask_mods.document(SORTED),
    "documents of float16": mask_mods.document(SORTED.half()),
    "dilated": mask_mods.dilated(70, 30),
    "neighborhood": mask_mods.neighborhood((7, 29), (3, 9)),
    "block diffusion": mask_mods.block_diffusion(100, 9),
    "documents or a prefix": mask_mods.or_masks(mask_mods.document(SORTED[0]), mask_mods.prefix(torch.tensor([3, 0]))),
    "by head": MaskMod(far_by_head, (torch.tensor([0, 100, 220, 30]),)),
    "bits": MaskMod(lambda b, h, i, j: ((i ^ j) & 64) == 0),
    "nothing": MaskMod(lambda b, h, i, j: (i < 0) & (j < 0)),
    "all": MaskMod(lambda b, h, i, j: (i >= 0) | (j >= 0)),
    "NaN": MaskMod(
        lambda b, h, i, j, x: ~(x[i] < x[j]), (torch.tensor([1.0, 2.0, torch.nan, 0.0]).repeat_interleave(65),)
    ),
}


BLOCK_M = 24  # no power of two
NO_KEYS = ("by head",)  # without summaries of blocks of keys
WINDOWS: dict[str, dict[str, Any]] = {
    "documents": {"causal": True},
    "by head": {"window": (50, 20)},
    "bits": {"causal": "top_left", "window": (70, None)},
    "all": {"window": (90, 0)},
}


@pytest.mark.parametrize("summarized", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_kernels_list_what_torch_operations_list(name: str, summarized: bool) -> None:
    """With a window too, for some masks. Blocks of keys are summarized by each program, or by a launch before."""
    q, k = torch.empty(2, 4, 203, 64, dtype=torch.bfloat16), torch.empty(2, 2, 211, 64, dtype=torch.bfloat16)
    call = described_call(q, k, k, None, None, {"mask": MASKS[name], **WINDOWS.get(name, {})})
    lists, listed = (
        importlib.import_module(f"{emulated_kernels().__package__}.{x}") for x in ("launch.block_lists", "plan.listed")
    )

    def found() -> list[Tensor]:
        recorder = Recorder(call.inputs)
        own = call._replace(tensors=Tensors.from_flat(recorder.inputs))
        results = [lists.row_lists(recorder, own, BLOCK_M, 32, None)]
        results += [lists.key_lists(recorder, own, BLOCK_M, 32, None, first_key_first=first) for first in (False, True)]
        return [pointers["lists"] for pointers, _ in results]

    with (
        mock.patch.object(listed, "LEAST_PAIRS", 0),
        mock.patch.multiple(lists, POSITIONS=64, MOST_BLOCKS=4, has_pair_bits=lambda _: False),
        mock.patch.object(lists, "LONG", 0 if summarized else 2**31),
        emulated() as launched,
        poisoned_allocation(),
    ):
        by_kernels = found()
        of_rows = ["key_summaries_kernel"] * (summarized and name not in NO_KEYS) + ["visible_blocks_kernel"]
        assert launched == [*of_rows, *[*of_rows, "key_lists_kernel"] * 2]
        with mock.patch.object(lists, "visibility_function", return_value=None):
            by_operations = found()
    for x, y in zip(by_kernels, by_operations, strict=True):
        length = y[:1, ..., :1].long()
        exists = torch.arange(y.shape[-1] - 1) < length
        assert x.shape == y.shape
        assert torch.equal(x[:1, ..., :1], y[:1, ..., :1])
        assert torch.equal(torch.where(exists, x[..., 1:], 0), torch.where(exists, y[..., 1:], 0))


# Bits of pairs --------------------------------------------------------------------------------------------------------

PARENTS = torch.tensor([-1, *((n - 1) // 3 for n in range(1, 260))])
ENDS = (torch.arange(211) // 40 * 40 + 60).clamp(max=203).int()
WITH_BITS = {name: mod for name, mod in MASKS.items() if name != "by head"} | {
    "tree": mask_mods.tree(PARENTS),
    "flashmask": mask_mods.flashmask(ENDS[None, None, :, None], causal=True),
}


@pytest.mark.parametrize("name", WITH_BITS)
def test_lists_and_bits_are_the_mask(name: str) -> None:
    """Blocks that are not listed are hidden, and bits are those of the pairs; of rows, and of keys."""
    mod = WITH_BITS[name]
    q, k = torch.empty(2, 1, 203, 64, dtype=torch.bfloat16), torch.empty(2, 1, 211, 64, dtype=torch.bfloat16)
    call = described_call(q, k, k, None, None, {"mask": mod})
    b, i, j = torch.arange(2)[:, None, None], torch.arange(203)[:, None], torch.arange(211)
    visible = torch.broadcast_to(mod.fn(b, torch.tensor(0), i, j, *mod.tensors), (2, 203, 211))
    in_window = torch.ones(203, 211, dtype=torch.bool)  # which the kernels test by position
    if call.settings.window_left is not None:
        in_window &= j >= i + 8 - call.settings.window_left
    if call.settings.window_right is not None:
        in_window &= j <= i + 8 + call.settings.window_right
    if call.settings.top_left:
        in_window &= j <= i
    lists, listed = (
        importlib.import_module(f"{emulated_kernels().__package__}.{x}") for x in ("launch.block_lists", "plan.listed")
    )
    with mock.patch.object(listed, "LEAST_PAIRS", 0), emulated(), poisoned_allocation():
        recorder = Recorder(call.inputs)
        own = call._replace(tensors=Tensors.from_flat(recorder.inputs))
        of_rows, _ = lists.row_lists(recorder, own, 128, 32, None)
        of_keys, _ = lists.key_lists(recorder, own, 64, 128, None, first_key_first=True)
    assert torch.equal(mask_of_lists(of_rows, 32, 203, 211) & in_window, visible)
    assert torch.equal(mask_of_lists(of_keys, 64, 211, 203) & in_window.mT, visible.mT)


def test_a_queue_of_entries_belongs_to_one_call() -> None:
    """Two calls on one stream at the same time, and one that ends between the kernels that fill and empty a queue."""
    mod = mask_mods.document(SORTED)
    q, k = torch.empty(2, 1, 203, 64, dtype=torch.bfloat16), torch.empty(2, 1, 211, 64, dtype=torch.bfloat16)
    call = described_call(q, k, k, None, None, {"mask": mod})
    visible = SORTED[:, :203, None] == SORTED[:, None, :211]
    lists, listed, semaphores = (
        importlib.import_module(f"{emulated_kernels().__package__}.{x}")
        for x in ("launch.block_lists", "plan.listed", "launch.semaphores")
    )
    pair_bits = lists.pair_bits

    def found() -> dict[str, Tensor]:
        recorder = Recorder(call.inputs)
        own = call._replace(tensors=Tensors.from_flat(recorder.inputs))
        return lists.row_lists(recorder, own, 128, 32, None)[0]  # type: ignore[no-any-return]

    def other_call_first(*arguments: Any) -> Tensor:
        with mock.patch.object(lists, "pair_bits", pair_bits):
            others.append(found())
        return pair_bits(*arguments)  # type: ignore[no-any-return]

    others: list[dict[str, Tensor]] = []
    on_a_stream = {"is_shared": lambda _: True, "current_stream_key": lambda: (0, 0), "entry_queues": {}}
    with (
        mock.patch.object(listed, "LEAST_PAIRS", 0),
        mock.patch.multiple(semaphores, **on_a_stream),
        emulated(),
        poisoned_allocation(),
    ):
        results = [found()]
        with mock.patch.object(lists, "pair_bits", side_effect=other_call_first):
            results += [found(), *others]
        with mock.patch.object(lists, "pair_bits", side_effect=MemoryError), pytest.raises(MemoryError):
            found()
        results.append(found())
        assert len(semaphores.entry_queues) == 1
    assert all(torch.equal(mask_of_lists(x, 32, 203, 211), visible) for x in results)


def mask_of_lists(pointers: dict[str, Tensor], width: int, lines: int, columns: int) -> Tensor:
    """The pairs that lists and bits show, of lines and columns `[2, lines, columns]`."""
    lists, bits = pointers["lists"][0, :, 0], pointers["mask_bits"]
    shown = torch.zeros(len(lists), lines + bits.shape[3], columns + 2 * width, dtype=torch.bool)
    for n, tiles in enumerate(lists.tolist()):
        for tile, (length, *entries) in enumerate(tiles):
            for position, entry in enumerate(entries[:length]):
                x = unpacked(bits[n, tile, 1 + position], width) if entry % 2 else torch.tensor(True)
                first_line, first_column = tile * bits.shape[3], entry // 2 * width
                shown[n, first_line : first_line + bits.shape[3], first_column : first_column + width] = x
    return shown[:, :lines, :columns].expand(2, -1, -1)


def unpacked(words: Tensor, width: int) -> Tensor:
    """Conditions `[lines, width]` of words `[lines, 4]`: a thread has two columns of every eight."""
    places = torch.arange(width // 4)
    x = (words[:, :, None] >> places) & 1  # [lines, threads, octets and pairs]
    return x.unflatten(2, (-1, 2)).transpose(1, 2).flatten(1).bool()


# Bugs -----------------------------------------------------------------------------------------------------------------


class Bug(NamedTuple):
    """A mistake, and a problem that shows it."""

    name: str
    file: str  # below `backend/hopper`
    old: str
    new: str
    problem: str


KERNELS, SHARED, WRITER = "kernels/visible_blocks.py", "kernels/shared/block_lists.py", "kernels/backward/dq_writer.py"
PRODUCER, BITS = "kernels/forward/producer.py", "kernels/pair_bits.py"
BUGS = (
    Bug("last entry forgotten", SHARED, "return offset, gl.load(lists.data + offset)",
        "return offset, gl.maximum(gl.load(lists.data + offset) - 1, 1)", "earlier 96"),
    Bug("partial blocks taken for full ones", SHARED, "((entry & 1) != 0,)", "((entry & 1) > 1,)",
        "heads of groups 64"),
    Bug("bits of the first rows for all", BITS, "place, part * MMA_M", "place, 0 * part", "earlier 96"),
    Bug("rows and keys swapped", BITS, "row, key = column, line", "row, key = line, column", "earlier 96"),
    Bug("bits of the entry before", SHARED, "= bit_words(offset, position", "= bit_words(offset, position - 1",
        "documents 64"),
    Bug("bits tested in cut blocks alone", SHARED, "cut | ((entry & 1) != 0)", "cut", "documents 64"),
    Bug("producer one entry behind", PRODUCER, "tile.hi - 2 - step)", "tile.hi - 1 - step)", "documents 64"),
    Bug("an empty list without a block", KERNELS, "tl.maximum(before, 1)", "before", "heads of groups 64"),
    Bug("heads of a group hide", KERNELS, "seen | ever", "ever", "heads of groups 64"),
    Bug("heads of a group show", KERNELS, "full & always", "always", "heads of groups 64"),
    Bug("left side one block further", KERNELS, "tl.minimum((n + 1)", "tl.minimum(n", "heads, window 128"),
    Bug("right side one key earlier", KERNELS, "n * BLOCK_N <= last_row + shift +",
        "n * BLOCK_N < last_row + shift - 127 +", "documents, causal 64"),
    Bug("ranks in the other order", KERNELS, "if FIRST_KEY_FIRST", "if not FIRST_KEY_FIRST", "heads of groups 128"),
    Bug("ranks of blocks", WRITER, "position = listed_rank", "position = position", "heads of groups 128"),
)  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_bug_is_caught(bug: Bug, tmp_path: Path) -> None:
    folder = tmp_path / f"lists_bug{BUGS.index(bug)}"
    copy_with_mistake(folder, bug.file, bug.name, bug.old, bug.new)
    try:
        assert wrong(bug.problem, folder)
    except EmulationError:
        return
