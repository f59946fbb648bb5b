"""Host code of KV-cache calls: dense caches, and a tensor with the number of keys of each sequence."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...call.cache import CacheCall, append_and_rotate
from ...call.cache_tensors import CacheTensors
from ...call.call import Tensors
from ...call.eight_bit import is_eight_bit
from ...call.plan import Plan
from ..replays import Results
from . import arguments as args
from .host_forward import launched_forward, replay_dequantized, replay_forward
from .launch import KernelLaunch
from .lengths import chunk, threads_for, used_splits, work_per_key
from .recording import Recording, recorded
from .tables import SEQUENCE_FIELDS

SEQLEN_K = SEQUENCE_FIELDS.index("seqlen_k")
PLACES = {name: len(Tensors._fields) - 1 + n for n, name in enumerate(CacheTensors._fields)}  # among a call's inputs
DESCALES = {name: PLACES[name] for name in ("k_descale", "v_descale")}
MOST_APPENDED_ALONE = 16  # sequences


class CacheReplay(NamedTuple):
    """A recorded call, which checks the lengths itself, and the launch that any call of its layout repeats."""

    checked_recording: "CacheRecording"
    launch: KernelLaunch

    def __call__(self, call: CacheCall) -> tuple[Tensor, Tensor]:
        return replay_forward(self.launch, append_and_rotate(call))


class CacheRecording:
    """The launch of a call with a dense cache and nothing but its lengths, which are read here."""

    def __init__(self, recording: Recording, call: CacheCall, table: Tensor):
        cache, launch = call.cache, recording.launch
        self.recording, self.table = recording, table  # the page table, as the kernel reads it
        self.capacity, self.appended = cache.k_cache.shape[2], 0 if cache.k is None else cache.k.shape[2]
        width = cache.k_cache.shape[3] + cache.v_cache.shape[3]
        self.tiles = launch.lengths.tasks
        self.work_per_key = work_per_key(self.tiles, launch.task_rows[1], width)
        self.launch = launch._replace(block=args.with_fields(launch.block, {"page_table": table.data_ptr()}))

    def __call__(self, inputs: Results) -> Results | None:
        """`out` and `lse`; `None` with lengths that it cannot repeat a call for."""
        held: list[int] = inputs[PLACES["cache_seqlens"]].tolist()  # type: ignore[union-attr]
        longest = max(held) + self.appended
        if min(held) < 0 or longest > self.capacity:
            return None
        if self.appended:
            if len(held) > MOST_APPENDED_ALONE and min(held) < max(held):
                return None
            for cache, new in (("k_cache", "k"), ("v_cache", "v")):
                if inputs[PLACES[new]] is not None:  # with v_dim there is no v
                    append(inputs[PLACES[cache]], inputs[PLACES[new]], held)  # type: ignore[arg-type]
        sequences = self.launch.lengths.table.copy()
        sequences[:-1, SEQLEN_K] = [n + self.appended for n in held]
        splits = used_splits(self.launch.splits, self.launch.least_splits, longest, self.launch.split_keys)
        tasks = self.tiles * splits
        of_split = chunk(longest, splits, self.launch.split_keys)
        fields = {"sequences": sequences.ctypes.data, "tasks": tasks, "splits": splits, "chunk": of_split}
        launch = self.launch._replace(
            block=args.with_fields(self.launch.block, fields),
            max_threads=min(tasks, threads_for(self.work_per_key, longest)),
        )
        results = self.recording.run(inputs, launch)
        del sequences  # alive until the kernel returns
        return results


def append(cache: Tensor, new: Tensor, held: Sequence[int]) -> None:
    """Write new keys behind the `held` ones of each sequence."""
    count = new.shape[2]
    if min(held) == max(held):
        cache.narrow(0, 0, len(held)).narrow(2, held[0], count).copy_(new)
        return
    for b, n in enumerate(held):
        cache.select(0, b).narrow(1, n, count).copy_(new.select(0, b))


def record_attend_with_cache(plan: Plan, call: CacheCall) -> tuple[Any, tuple[Tensor, Tensor]]:
    """As `record_forward`, of the attention that remains once new keys are in the cache."""
    attention = append_and_rotate(call)
    if is_eight_bit(call.tensors.q):
        repeat, results = replay_dequantized(plan, attention)
        return None if repeat is None else lambda call: repeat(append_and_rotate(call)), results
    launch, tensors, results = launched_forward(plan, attention)
    if attention.settings.mask_mod is not None:  # whose blocks depend on lengths
        return None, results
    table = tensors.pop("page_table", None)
    recording = None
    if table is not None and is_simple(call):
        recording = recorded(call, launch, tensors, results, of_cache=DESCALES)
    if recording is None or table is None:
        return lambda call: replay_forward(launch, append_and_rotate(call)), results
    return CacheReplay(CacheRecording(recording, call, table), launch), results


def is_simple(call: CacheCall) -> bool:
    """Whether a call has caches, their lengths, and perhaps new keys as dense as the queries; sequences in order."""
    cache = call.cache
    if cache.k is not None and is_eight_bit(cache.k_cache):  # which are quantized
        return False
    usual = ("k_cache", "v_cache", "cache_seqlens", "k", "v", "k_descale", "v_descale")
    others = cache._replace(**dict.fromkeys(usual))
    return all(x is None for x in others) and call.tensors.cu_seqlens_q is None and call.tensors.q.shape[0] > 0
