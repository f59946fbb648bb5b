"""The ladder's further algorithms: results against float64, bytes and operations against exact counts."""

import importlib
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashtile_ladder import step05_flash1, step06_flash2
from flashtile_ladder.measure.counted import count
from flashtile_ladder.related import (
    block_sparse,
    flash3,
    fusion,
    intensity,
    launcher,
    linear_attention,
    lsh_attention,
    saved_for_backward,
    shared_memory,
    softmax_passes,
    stream_k,
    tensor_parallel,
    tiled_matmul,
    unified_max,
)

PAGE = Path(__file__).parents[1] / "docs" / "ladder-algorithms.md"


def doubles(*shape: int) -> list[Tensor]:
    return [torch.randn(*shape, dtype=torch.float64) for _ in range(3)]


def close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


# Bytes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [1, 3, 8, 50])
def test_tiled_product(tile: int) -> None:
    """Right, and with the bytes of the formula, also where no tile divides; a tile of 1 is the definition."""
    a, b = torch.randn(7, 11, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    counts, (c,) = count(tiled_matmul.matmul, [a, b], tile)
    close(c, a @ b)
    assert sum(counts.values()) == tiled_matmul.bytes_moved(7, 11, 5, tile, itemsize=8)
    assert counts["written"] == 8 * 7 * 5
    if tile == 1:
        assert counts["read"] == 8 * 7 * 5 * 2 * 11
    q, k, v = doubles(10, 4)
    counts, (out,) = count(tiled_matmul.chained, [q, k, v], tile)
    close(out, q @ k.mT @ v)
    assert counts == {"read": 8 * (40 + 2 * 40 * math.ceil(10 / tile)), "written": 8 * 40}
    counts, (out,) = count(tiled_matmul.chained_keys_outside, [q, k, v], tile)
    close(out, q @ k.mT @ v)
    visits = math.ceil(10 / tile)
    assert counts == {"read": 8 * (2 * 40 + 2 * 40 * visits), "written": 8 * (40 + 40 * visits)}


def test_largest_tile() -> None:
    assert (
        3 * tiled_matmul.largest_tile(48 * 1024) ** 2 <= 48 * 1024 < 3 * (tiled_matmul.largest_tile(48 * 1024) + 1) ** 2
    )


def test_fusion_halves_the_bytes() -> None:
    x, bias = torch.randn(12, 12), torch.randn(12)
    for apart, fused, arguments, extra in (
        (fusion.bias_relu_apart, fusion.bias_relu_fused, ([x, bias],), 4 * 12),
        (fusion.softmax_apart, fusion.softmax_fused, ([x], 0.3), 0),
    ):
        (many, (y,)), (few, (z,)) = (count(function, *arguments) for function in (apart, fused))
        launches = next(numbers for a, _, numbers in fusion.PAIRS.values() if a is apart)
        assert sum(many.values()) == launches[0] * 2 * x.nbytes + extra
        assert sum(few.values()) == 2 * x.nbytes + extra
        assert torch.equal(y, z)
    assert torch.equal(z, torch.softmax((0.3 * x).masked_fill(torch.ones(12, 12).triu(1) > 0, -math.inf), 1))


def test_accesses_of_a_softmax() -> None:
    x = torch.randn(23, dtype=torch.float64)
    for function, reads in ((softmax_passes.naive, 2), (softmax_passes.safe, 3), (softmax_passes.online, 2)):
        counts, (y,) = count(function, [x])
        close(y, torch.softmax(x, 0))
        assert counts == {"read": reads * x.nbytes, "written": x.nbytes}


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_two_passes(causal: bool) -> None:
    """K is read twice and V once, where one pass reads each once."""
    q, k, v = doubles(50, 4)
    sizes = {"block_m": 16, "block_n": 8}
    one, (expected, lse) = count(step06_flash2.attention, [q, k, v], causal, **sizes)
    two, found = count(softmax_passes.attention, [q, k, v], causal, **sizes)
    close(found[0], expected)
    close(found[1], lse)
    once = (one["read"] - q.nbytes) // 2  # K, and as much of V
    assert two == {"read": one["read"] + once, "written": one["written"]}


# Sparse and approximate ----------------------------------------------------------------------------------------------


def test_block_sparse_attention() -> None:
    """Right for any mask and length, backward too; a hidden tile is not read, which infinities in it would show."""
    q, k, v = doubles(64, 8)
    for blocks in (block_sparse.butterfly(8), block_sparse.local_and_global(8), torch.rand(8, 8) < 0.3):
        counts, (out, lse) = count(block_sparse.attention(blocks, 8), [q, k, v])
        close(out, block_sparse.exact(q, k, v, blocks, 8))
        assert sum(counts.values()) == block_sparse.bytes_moved(64, 8, blocks, itemsize=8)
        visible = blocks.repeat_interleave(8, 0).repeat_interleave(8, 1)
        found, expected = (
            step05_flash1.backward(q, k, v, out, lse, v, **mask, memory=256)
            for mask in ({"blocks": blocks}, {"mask": visible})
        )
        for x, y in zip(found, expected, strict=True):
            close(x, y)
    empty = torch.zeros(8, 8, dtype=torch.bool)
    empty[1:, 2] = True
    k[:16], k[24:] = math.nan, math.nan
    out, lse = block_sparse.attention(empty, 8)(q, k, v)
    assert torch.equal(out[:8], torch.zeros(8, 8, dtype=torch.float64))
    assert torch.equal(lse == -math.inf, torch.arange(64) < 8)
    close(out[8:], block_sparse.exact(q[8:], k[16:24], v[16:24], torch.ones(7, 1) > 0, 8)[:56])
    q, k, v = doubles(50, 8)  # the last tiles are partial
    ones = torch.ones(7, 7, dtype=torch.bool)
    for x, y in zip(block_sparse.attention(ones, 8)(q, k, v), step05_flash1.attention(q, k, v), strict=True):
        close(x, y)
    with pytest.raises(ValueError, match=r"blocks is \(7, 6\); here it is \(7, 7\)"):
        block_sparse.attention(ones[:, 1:], 8)(q, k, v)


def test_butterfly_connects_all_blocks() -> None:
    blocks = block_sparse.butterfly(16)
    assert int(blocks.sum()) == 16 * 5
    assert bool((torch.linalg.matrix_power(blocks.double(), 4) > 0).all())
    assert not bool((torch.linalg.matrix_power(blocks.double(), 3) > 0).all())


def test_linear_attention() -> None:
    """The order of the products does not matter; random features come nearer as 1 / sqrt(their number)."""
    q, k, v = doubles(150, 8)
    for features in (linear_attention.elu_features, linear_attention.random_features(8, 20)):
        for causal in (False, True):
            found = linear_attention.attention(q, k, v, causal, features=features)
            close(found, linear_attention.quadratic(q, k, v, causal, features=features))
    errors = [linear_attention.relative_error(number, n=128, d=16) for number in (64, 1024, 16384)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert linear_attention.operations(4096, 64, 64)[0] < linear_attention.operations(4096, 64, 64)[1] / 30


def test_attention_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over the pairs that any round sees, each once; and all pairs, if one bucket has all."""
    torch.manual_seed(0)
    q, v, _ = doubles(60, 8)
    given = {"buckets": 4, "rounds": 3, "chunk": 12, "seed": 1}
    out, lse = lsh_attention.attention(q, v, **given)
    i = torch.arange(60)
    rounds = [this.sees(i[:, None], i) for this in lsh_attention.hashes(q, 4, 3, 12, 1)]
    seen = torch.stack(rounds).any(dim=0)
    assert 0.1 < seen.double().mean() < 0.9
    assert int(torch.stack(rounds).sum(dim=0).max()) == 3, "some pairs are seen by all rounds"
    expected, expected_lse = lsh_attention.exact(q, v, seen)
    close(out, expected)
    close(lse, expected_lse)
    close(lsh_attention.attention(q, v, buckets=2, rounds=20, chunk=60)[0], lsh_attention.exact(q, v)[0])
    monkeypatch.setattr(torch, "log", torch.zeros_like)  # the bug: pairs of several rounds count several times
    wrong, _ = lsh_attention.attention(q, v, **given)
    assert (wrong - expected).abs().max() > 0.01


# Other schedules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_a_constant_in_place_of_the_maximum(causal: bool) -> None:
    """Right for scores in range and out of it; without the check, scores out of range give no number."""
    q, k, v = (x.float() for x in doubles(50, 8))
    for factor, phi in ((1.0, 0.0), (1.0, 3.0), (40.0, 0.0)):
        expected, expected_lse = step06_flash2.attention(q.double(), k.double(), v.double(), causal, factor)
        out, lse = unified_max.attention(q, k, v, causal, factor, phi=phi)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5 * max(1, factor))
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)
    assert 0 < unified_max.rows_taken_again(q, k, 40.0) <= 50
    assert unified_max.rows_taken_again(q, k, 0.3) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unified_max, "RANGE", math.inf)
        assert not bool(unified_max.attention(q, k, v, causal, 40.0)[0].isfinite().all())


def test_stream_k() -> None:
    """Each tile once, shares that differ by one at most, and attention for any number of workers."""
    for outputs, keys, workers in ((3, 5, 4), (1, 7, 3), (4, 2, 16), (5, 1, 1)):
        shares = stream_k.pieces(outputs, keys, workers)
        sizes = [sum(piece.last - piece.first for piece in own) for own in shares]
        assert max(sizes) - min(sizes) <= 1
        tiles = [(piece.output, j) for own in shares for piece in own for j in range(piece.first, piece.last)]
        assert sorted(tiles) == list(itertools.product(range(outputs), range(keys)))
    q, k, v = doubles(200, 4)
    for causal in (False, True):
        expected, expected_lse = step06_flash2.attention(q, k, v, causal)
        for workers in (1, 3, 7):
            out, lse = stream_k.attention(q, k, v, causal, workers=workers)
            close(out, expected)
            close(lse, expected_lse)
    whole, streamed = stream_k.busy(133, 10, 132)
    assert (whole, streamed) == (pytest.approx(133 / 264), pytest.approx(1330 / 132 / 11))


def test_heads_over_devices() -> None:
    x, w_qkv, w_out = (torch.randn(*shape, dtype=torch.float64) for shape in ((9, 12), (12, 3, 8), (8, 12)))
    q, k, v = ((x @ w_qkv[:, i]).view(9, 4, 2).transpose(0, 1) for i in range(3))
    expected = (torch.softmax(q @ k.mT / math.sqrt(2), -1) @ v).transpose(0, 1).reshape(9, 8) @ w_out
    for devices in (1, 2, 4):
        close(tensor_parallel.parallel_layer(x, w_qkv, w_out, 4, devices), expected)
    assert [tensor_parallel.numbers_sent(9, 12, devices) for devices in (1, 2)] == [0, 108]
    with pytest.raises(ValueError, match="4 heads do not go onto 3"):
        tensor_parallel.parallel_layer(x, w_qkv, w_out, 4, 3)


def test_what_backward_keeps() -> None:
    """P; with dropout P, its factors and their product. Flash: out, lse, and the generator's state."""
    n, d = 64, 16
    state = torch.Generator().get_state().nbytes
    assert saved_for_backward.saved_bytes(saved_for_backward.standard, n, d) == 4 * n**2
    assert saved_for_backward.saved_bytes(saved_for_backward.standard, n, d, 0.1) == 3 * 4 * n**2
    assert saved_for_backward.saved_bytes(saved_for_backward.flash, n, d) == 4 * n * (d + 1)
    assert saved_for_backward.saved_bytes(saved_for_backward.flash, n, d, 0.1) == 4 * n * (d + 1) + state
    q, k, v = (x.requires_grad_() for x in doubles(20, 4))
    for function in (saved_for_backward.standard, saved_for_backward.flash):
        grads = torch.autograd.grad(function(q, k, v).sum(), (q, k, v))
        expected = torch.autograd.grad((torch.softmax(q @ k.mT / 2, 1) @ v).sum(), (q, k, v))
        for x, y in zip(grads, expected, strict=True):
            close(x, y)


# Counts --------------------------------------------------------------------------------------------------------------


def test_intensity_of_models() -> None:
    base, large, gpt2 = intensity.MODELS
    for model in (base, large):
        curve = [intensity.run(model, 2**x).intensity for x in range(4, 15)]
        top = curve.index(max(curve))
        assert curve[:top] == sorted(curve[:top])
        assert curve[top:] == sorted(curve[top:], reverse=True)
        assert 2 ** (top + 4) == 512
    # 12 layers of 24 N D² and 4 N² D, and what is not a product
    n, d = 128, 768
    products = 12 * (24 * n * d**2 + 4 * n**2 * d)
    others = 12 * (5 * 12 * n**2 + 8 * 4 * n * d + 8 * 2 * n * d)
    work = intensity.run(base, n)
    assert (work.flops, work.softmax) == (products, others)
    assert intensity.run(gpt2, 64).intensity < 1.1
    # one token: every weight once
    work = intensity.layer(gpt2, 1, 1)["projections"]
    assert work.moved == 2 * (4 * d**2 + 6 * d)
    assert (
        intensity.decode_intensity(gpt2, 1024, 64)["attention"]
        == intensity.decode_intensity(gpt2, 1024, 1)["attention"]
    )


def test_balance_batch() -> None:
    """With this many sequences a weight's read takes as long as its products."""
    machine = intensity.Machine(300e12, 2e12)
    assert intensity.balance_batch(machine) == 150
    batch, weights = int(intensity.balance_batch(machine)), 10**6
    assert 2 * batch * weights / machine.flops_per_second == 2 * weights / machine.bytes_per_second
    assert intensity.balance_batch(machine, itemsize=1) == 75


def test_kernels_of_a_launcher() -> None:
    """Counted by hand; and a kernel may lack a mask only where the call needs none."""
    softcap_or_dropout, no_window, window = 3, 3 + 1, 2 + 1
    assert len(launcher.kernels(128)) == softcap_or_dropout * (2 * no_window + window) == 33
    assert len(launcher.kernels(256)) == 27
    for flags in itertools.product((False, True), repeat=7):
        call = launcher.Flags(*flags)
        for tile_d in (64, 256):
            kernel = launcher.kernel_for(call, tile_d)
            assert kernel.even_mn <= call.even_mn
            assert kernel.even_k <= call.even_k
            assert (kernel.causal, kernel.alibi, kernel.softcap) == (call.causal, call.alibi, call.softcap)
            assert launcher.kernel_for(kernel, tile_d) == kernel
    sizes = {"block_m": 64, "block_n": 128, "tile_d": 64}
    assert launcher.flags_of(128, 256, 64, **sizes) == launcher.Flags(even_mn=True, even_k=True)
    assert launcher.flags_of(128, 200, 40, causal=True, window=(5, 0), **sizes) == launcher.Flags(causal=True)
    assert not launcher.flags_of(128, 256, 64, packed=True, **sizes).even_mn


def test_workers_of_a_deterministic_backward() -> None:
    assert [launcher.deterministic_workers(132, b, h) for b, h in ((1, 1), (1, 131), (1, 132), (1, 133))] == [
        132,
        2,
        1,
        1,
    ]
    assert launcher.dq_bytes(132, 1, 16, 4000, 120) == 4 * 9 * 16 * 4096 * 128


def test_shared_memory_of_tiles() -> None:
    """The published figures, which round halves to even numbers: 18 KB at d = 64; 66, 50 and 82 KB at d = 256."""
    tile = shared_memory.Tile
    published = {tile(64, 64, 64): 18, tile(64, 64, 256): 66, tile(64, 32, 256): 50, tile(128, 32, 256): 82}
    assert {t: round(t.bytes / 1024) for t in published} == published
    assert [t.has_to_ask for t in published] == [False, True, True, True]
    assert tile(64, 64, 64, shared=False).bytes == tile(64, 64, 64, stages=2).bytes == 27 * 1024
    for d in (64, 128, 256):
        keys = shared_memory.largest_keys(48 * 1024, 32, d)
        assert tile(32, keys, d).bytes <= 48 * 1024 < tile(32, keys + 16, d).bytes
    assert shared_memory.largest_keys(48 * 1024, 640, 256) == 0
    assert tile(64, 64, 64).blocks(164 * 1024) == 8


def test_flash3_is_attention_in_another_order() -> None:
    """Partial tiles, one tile, rows that see nothing of a tile."""
    for n, causal in ((1, False), (40, True), (100, False), (100, True)):
        q, k, v = torch.randn(3, n, 8, dtype=torch.float64)
        found = flash3.attention(q, k, v, causal, block_m=32, block_n=16)
        for x, y in zip(found, step06_flash2.attention(q, k, v, causal), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_products_and_exponentials_at_the_same_time() -> None:
    """Without overlap the shares are those of the sums by hand; with it the longer of the two units decides."""
    for d, alone in ((64, 1 / 2), (128, 2 / 3), (32, 1 / 3)):
        assert flash3.busy(d) == pytest.approx(alone)
        most = min(1.0, d / 64)
        for given in ({"pipelined": True}, {"warpgroups": 2}, {"warpgroups": 2, "pipelined": True}):
            assert alone < flash3.busy(d, **given) <= most
        assert flash3.busy(d, pipelined=True, tiles=1000) == pytest.approx(most, rel=0.01)


# The page ------------------------------------------------------------------------------------------------------------

COUNTED = (
    "measure.counted",
    "related.tiled_matmul",
    "related.fusion",
    "related.softmax_passes",
    "related.complexity",
    "related.intensity",
    "related.saved_for_backward",
    "related.block_sparse",
    "related.stream_k",
    "related.tensor_parallel",
    "related.launcher",
    "related.shared_memory",
    "related.flash3",
)


@pytest.mark.parametrize("module", COUNTED)
def test_the_page_has_what_the_files_print(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every word and every count. Rounding errors, with an exponent, are the machine's."""
    importlib.import_module(f"flashtile_ladder.{module}").main()
    name = module.rpartition(".")[2]
    shown = re.search(rf"<!-- {name} -->\n```text\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None, f"the page has no output of {module}"
    error = re.compile(r"\d\.\de[-+]\d\d")
    assert error.sub("E", shown[1]).split() == error.sub("E", capsys.readouterr().out).split()
