"""The kernels that calls of one kind compile, over all lengths and batches."""

import random
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from random_problems import H100

from flashtile.cli import explain
from flashtile.prebuilt import workload
from flashtile.prebuilt.standard import StandardCall, empty
from flashtile.prebuilt.workload import BACKWARD, DECODING, FORWARD, MOST_ROWS, Kernels, compiled_kernels, lines_of

HEADS = 16
# Head dimension, whether calls are causal, and most kernels of forward, of backward and of a few queries.
WORKLOADS = ((64, True, (7, 6, 6)), (128, False, (4, 6, 5)))
DRAWN = 30


def kernels_of(head_dim: int, causal: bool, sizes: list[tuple[int, int, int]] | None = None) -> dict[str, Kernels]:
    def call_of(batch: int, seqlen_q: int, seqlen_k: int) -> StandardCall:
        q, k, v = (empty(batch, HEADS, n, head_dim, dtype=torch.bfloat16) for n in (seqlen_q, seqlen_k, seqlen_k))
        return StandardCall("attention", {"q": q, "k": k, "v": v, "causal": causal}, backward=True)

    with mock.patch.object(workload, "sizes", workload.sizes if sizes is None else lambda: iter(sizes)):
        return compiled_kernels(call_of, H100)


@pytest.mark.parametrize(("head_dim", "causal", "most"), WORKLOADS)
def test_few_kernels_serve_all_lengths(head_dim: int, causal: bool, most: tuple[int, int, int]) -> None:
    """Bounds are what there is today: fewer kernels are less waiting. Calls between the listed lengths and batches need
    none besides.
    """
    found = kernels_of(head_dim, causal)
    counts = tuple(len(found[kind]) for kind in (FORWARD, BACKWARD, DECODING))
    assert all(0 < count <= bound for count, bound in zip(counts, most, strict=True)), counts
    draw, sizes = random.Random(0), []
    while len(sizes) < DRAWN:
        batch, length = int(2 ** draw.uniform(0, 6)), int(2 ** draw.uniform(5, 16))
        if batch * length <= MOST_ROWS:
            sizes.append((batch, draw.choice((1, length, length)), length))
    drawn = kernels_of(head_dim, causal, sizes)
    assert {kind: lines_of(x) for kind, x in drawn.items() if x.keys() - found[kind].keys()} == {}


def test_lines_say_where_kernels_differ() -> None:
    found = kernels_of(128, False, [(1, 512, 512), (8, 4096, 4096), (1, 1, 8192)])
    lines = lines_of(found[FORWARD])
    assert len(lines) == len(set(lines)) > 0
    assert all("first needed by batch" in line for line in lines)
    [decoding] = lines_of(found[DECODING])
    assert decoding.endswith("forward_kernel: first needed by batch 1, 1 x 8192")


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`flashtile explain --kernels --device cuda --dtype bfloat16 --heads 4 --causal`, on an H100."""
    monkeypatch.setattr(explain, "describe_device", lambda _: H100)
    monkeypatch.setattr(workload, "sizes", lambda: iter([(1, 512, 512), (2, 1, 512)]))
    options = {"heads": 4, "heads_kv": None, "head_dim": 64, "head_dim_v": None, "dtype": torch.bfloat16}
    options |= {"device": "cuda", "backend": "auto", "causal": "bottom_right", "dropout": 0.0}
    options |= dict.fromkeys(("deterministic", "batch_invariant"), False)
    options |= dict.fromkeys(("window", "softcap", "scale", "bias", "alibi", "sinks"))
    explain.run(False, True, **options)
    forward, _, backward, _, few, _ = capsys.readouterr().out.splitlines()
    assert (forward, backward, few) == tuple(f"kernels of {kind}: 1" for kind in (FORWARD, BACKWARD, DECODING))
