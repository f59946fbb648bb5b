"""`flashtile.prepare` on a CPU: what it is told to prepare needs no compiler afterwards."""

import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import invoke
from torch import Tensor

import flashtile
from flashtile.backend import compiling, user_files
from flashtile.backend.archive import NO_ARCHIVE
from flashtile.backend.cpu import archive, machine_code
from flashtile.call import counting
from flashtile.call.device import describe_device
from flashtile.cli import prepare as command
from flashtile.dispatch import fast_path, observed
from flashtile.prebuilt import helpers, needed, prepare, transformers_model
from flashtile.prebuilt.ranges import records_of_ranges

CPU = torch.device("cpu")
KIND = {"heads": 4, "heads_kv": 2, "head_dim": 16, "head_dim_v": 16, "layout": "dense", "page_size": None}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, in a process that has no kernels yet."""
    monkeypatch.setenv(user_files.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(archive.KERNELS_VARIABLE, NO_ARCHIVE)
    monkeypatch.setattr(archive, "_archive", {})
    loaded: Any = machine_code.loaded
    monkeypatch.setattr(machine_code, "loaded", functools.lru_cache(loaded.__wrapped__))
    fast_path.forget()
    yield tmp_path / "cache"
    fast_path.forget()


def inputs(batch: int, rows: int, keys: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = ((batch, 4, rows, 16), (batch, 2, keys, 16), (batch, 2, keys, 16))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def compiled_by(run: Callable[[], Any]) -> int:
    before = compiling.compiled
    run()
    return compiling.compiled - before


def test_ranges(cache: Path) -> None:
    """Calls of other lengths and batches in the ranges compile nothing."""
    prepared = flashtile.prepare(
        heads=4, heads_kv=2, head_dim=16, dtype=torch.float32, causal=True, lengths=(40, 300), batches=(1, 3),
        device="cpu", jobs=1,
    )  # fmt: skip
    assert prepared.compiled == prepared.kernels == 2
    assert str(prepared).startswith(f"2 kernels for {describe_device(CPU).name}; 2 compiled in ")
    draw = random.Random(0)

    def calls() -> None:
        for _ in range(5):
            length = draw.randint(40, 300)
            flashtile.attention(*inputs(draw.randint(1, 3), length, length), causal=True).sum().backward()

    assert compiled_by(calls) == 0
    assert compiled_by(lambda: flashtile.attention(*inputs(1, 50, 50), softcap=2.0)) == 1  # so that this can fail


def test_an_example(cache: Path) -> None:
    """Its results are zeros, and nothing is appended to a cache."""
    q, k, v = inputs(2, 24, 24)
    caches = [torch.ones(2, 2, 32, 16) for _ in range(2)]
    new = [torch.ones(2, 2, 1, 16) * 2 for _ in range(2)]
    lengths = torch.tensor([3, 9], dtype=torch.int32)
    found = []

    def example() -> None:
        out = flashtile.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 1.25)
        found.extend((out, *torch.autograd.grad(out.sum(), (q, k, v))))
        with torch.no_grad():
            found.append(decode())

    def decode() -> Tensor:
        return flashtile.attention_with_kvcache(q[:, :, :1], *caches, cache_seqlens=lengths, k=new[0], v=new[1])

    prepared = flashtile.prepare(example, device="cpu", jobs=1)
    assert prepared.compiled == prepared.kernels == 3
    assert [x.abs().max() for x in found] == [0] * 5
    assert [x.shape for x in found[:4]] == [x.shape for x in (q, q, k, v)]
    assert [x.min() for x in caches] == [1, 1]
    found.clear()
    assert compiled_by(example) == 0
    assert all(x.abs().max() > 0 for x in found)


def test_a_log(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each new kind of pass, which is enough to compile its kernels elsewhere."""
    log = tmp_path / "calls.jsonl"
    monkeypatch.setenv(observed.LOG_VARIABLE, str(log))
    for name, value in (("opened", ()), ("_always", ())):
        monkeypatch.setattr(counting, name, value)
    monkeypatch.setattr(observed, "_known", set())
    counting.open_always()
    given = inputs(1, 48, 48)

    def calls() -> None:
        for _ in range(3):
            flashtile.attention(*given, causal=True).sum().backward()
        flashtile.attention(*given, mask=lambda b, h, i, j: i >= j)

    calls()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [x.get("needs") for x in records] == [None, ["q", "k", "v"]]  # functions have no record
    monkeypatch.setattr(counting, "opened", ())
    monkeypatch.setenv(user_files.CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    monkeypatch.delenv(observed.LOG_VARIABLE)
    loaded: Any = machine_code.loaded
    loaded.cache_clear()
    log.write_text(log.read_text() + log.read_text() + json.dumps(records[0] | {"device": "cuda"}) + "\n")
    assert flashtile.prepare(log=log, device="cpu", jobs=1).compiled == 2
    assert flashtile.prepare(log=log, device="cpu").compiled == 0
    log.write_text("no record\n")
    with pytest.raises(flashtile.ArgumentError, match="FLASHTILE_LOG_CALLS"):
        flashtile.prepare(log=log)


def varlen() -> Any:
    q = torch.randn(50, 4, 16)
    offsets = torch.tensor([0, 20, 50], dtype=torch.int32)
    return flashtile.attention_varlen(q, q[:, :2], q[:, :2], offsets, offsets, max_seqlen_q=30, max_seqlen_k=30)


def paged() -> Any:
    pages, lengths = torch.randn(6, 16, 2, 16), torch.tensor([40, 7], dtype=torch.int32)
    table, offsets = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    q = torch.randn(2, 4, 16)
    return flashtile.attention_varlen(
        q, pages, pages, offsets, None, seqused_k=lengths, page_table=table, max_seqlen_k=40, causal=True
    )


def cached(**more: Any) -> Any:
    caches = [torch.randn(3, 2, 32, 16) for _ in range(2)]
    new = {name: torch.randn(2, 2, 1, 16) for name in ("k", "v")}
    call = {"cache_seqlens": torch.tensor([4, 30], dtype=torch.int32), **new, **more}
    index = torch.tensor([2, 0], dtype=torch.int32)
    return flashtile.attention_with_kvcache(torch.randn(2, 4, 1, 16), *caches, cache_batch_idx=index, **call)


def with_features() -> Any:
    q, k, v = inputs(2, 33, 33, torch.bfloat16)
    features = {"bias": torch.randn(1, 4, 33, 33, dtype=torch.bfloat16), "sinks": torch.randn(4), "dropout_p": 0.1}
    return flashtile.attention(q.mT.contiguous().mT, k, v, **features, dropout_seed=1, window=(9, 0)).sum().backward()


@pytest.mark.parametrize("run", [varlen, paged, cached, with_features], ids=lambda run: run.__name__)
def test_records_need_the_kernels_of_their_calls(run: Callable[[], Any]) -> None:
    """After a way through JSON."""
    device, seen = describe_device(CPU), []

    def see(call: Any, needs: Any) -> None:
        kernels = needed.kernels_of(call, needs, device)
        record = json.loads(json.dumps(prepare.record_of(call, needs)))
        seen.append((kernels.keys(), needed.kernels_of_record(record, device).keys()))

    with observed.example(see):
        run()
    assert len(seen) == (2 if run is with_features else 1)
    assert all(of_call == of_record and of_call for of_call, of_record in seen)


def test_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra `transformers`")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 64}
    config = transformers.CONFIG_MAPPING["gemma2"](**sizes)
    config.save_pretrained(tmp_path)
    ranges = {"lengths": (128, 128), "batches": (2, 2), "device": "cpu"}
    for given in (config, tmp_path, str(tmp_path)):
        found = [*transformers_model.records_of_model(given, torch.bfloat16, {}, training=False, **ranges)]
        assert [x["tensors"]["q"][:2] for x in found] == [["bfloat16", [2, 4, rows, 32]] for rows in (128, 1)] * 2
        assert {x["settings"].get("window_left") for x in found} == {None, 63}
        assert all(x["settings"]["window_right"] == 0 and x["settings"]["softcap"] == 50 for x in found)
    bert = transformers.CONFIG_MAPPING["bert"]()
    assert not any("window_right" in x["settings"] for x in transformers_model.records_of_model(
        bert, None, {"mask": True}, training=True, **ranges
    ))  # fmt: skip
    with pytest.raises(flashtile.ArgumentError, match="`model`"):
        flashtile.prepare(model=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "one of: an example"),
        ({"heads": 4, "model": "x"}, "one of: an example"),
        ({"heads": 4, "dtype": torch.float32}, "`head_dim` is NoneType None"),
        ({"heads": 4, "head_dim": 16}, "`dtype`"),
        ({"heads": 4, "head_dim": 16, "dtype": torch.float32, "layout": "x"}, "`layout`"),
        ({"heads": 4, "head_dim": 16, "dtype": torch.float32, "page_size": 16}, "`page_size`"),
        ({"heads": 4, "head_dim": 16, "dtype": torch.float32, "lengths": (9, 3)}, "`lengths`"),
        ({"heads": 4, "head_dim": 16, "dtype": torch.float32, "casual": True}, "casual"),
        ({"heads": 4, "heads_kv": 3, "head_dim": 16, "dtype": torch.float32}, "divides the 4 heads"),
    ],
)
def test_errors(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(flashtile.AttentionError, match=words):
        flashtile.prepare(**arguments, device="cpu")


def test_helpers_share_the_work(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kernel has one process that compiles it; here both run in this one."""
    device = describe_device(CPU)
    (record,) = records_of_ranges(
        KIND | {"dtype": torch.float32}, {}, lengths=(64, 64), batches=(1, 1), training=True, device="cpu"
    )
    keys = [*needed.kernels_of_record(record, device)]
    assert len(keys) == 2
    work = {"calls": [record], "keys": keys[:1], "device": device, "target": None}
    (tmp_path / helpers.WORK).write_text(json.dumps(work))
    assert [compiled_by(lambda: helpers.main(str(tmp_path))) for _ in range(2)] == [1, 0]
    assert needed.is_loaded_from_cache(needed.kernels_of_record(record, device)[keys[0]])
    assert not needed.is_loaded_from_cache(needed.kernels_of_record(record, device)[keys[1]])


def test_a_helper_that_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are compiled here, and a warning says why."""
    monkeypatch.setattr(helpers, "CODE", "raise SystemExit('no memory')")
    monkeypatch.setattr(helpers, "run_python", lambda *_, **__: helpers.CODE and Ended())
    with pytest.warns(flashtile.AttentionWarning, match="failed: no memory"):
        prepared = flashtile.prepare(
            heads=2, head_dim=16, dtype=torch.float32, lengths=(32, 32), batches=(1, 1), device="cpu", jobs=2
        )
    assert prepared.compiled == prepared.kernels == 2


class Ended:
    stdout, stderr = "", "Traceback\nno memory\n"


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    result = prepare.Prepared("a device", 3, 1, 2, 1.25, 4)
    monkeypatch.setattr(command, "prepare", lambda **given: seen.update(given) or result)
    words = "prepare --heads 8 --head-dim 64 --dtype bfloat16 --causal --window 99, --lengths 1:512 --batches 4"
    found = invoke((*words.split(), "--feature", "sinks", "--serving", "--device", "cpu"))
    assert found.stdout == "3 kernels for a device, 1 of them in the archive; 2 compiled in 1.2 s by 4 processes\n"
    expected = {
        "heads": 8, "head_dim": 64, "dtype": torch.bfloat16, "causal": True, "window": (99, None), "sinks": True,
        "lengths": (1, 512), "batches": (4, 4), "training": False, "model": None, "log": None,
    }  # fmt: skip
    assert expected.items() <= seen.items()
    assert json.loads(invoke((*words.split(), "--json")).stdout)["kernels"] == 3
    assert invoke(("prepare", "--lengths", "x", "--heads", "1")).exit_code == 2
