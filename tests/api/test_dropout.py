"""One dropout mask for a seed: on every backend, layout and tile size, in forward and in backward."""

import math

import pytest
import torch
from checking import BACKENDS, dense_case, offsets, tile_size
from torch import Tensor

import flashtile
from flashtile.backend.blockwise import rng

B, HQ, HKV, SQ, SK = 2, 4, 2, 5, 37
SEED = 0x0123456789ABCDEF

# The contract once more, in Python's own integers -------------------------------------------------------------------


def philox(counter: tuple[int, ...], key: tuple[int, int], rounds: int = 7) -> tuple[int, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high_0, low_0 = divmod(c0 * 0xD2511F53, 2**32)
        high_1, low_1 = divmod(c2 * 0xCD9E8D57, 2**32)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def keep_factor(seed: int, p: float, sequence_head: int, i: int, j: int) -> float:
    words = philox((j // 8, i, sequence_head, 0), (seed % 2**32, seed // 2**32 % 2**32))
    half = words[j % 8 // 2] >> 16 * (j % 2) & 0xFFFF
    t = round(p * 65536)
    return 65536 / (65536 - t) if half >= t else 0.0


def expected_mask(seed: int, p: float, batch: int = B, heads: int = HQ, rows: int = SQ, keys: int = SK) -> Tensor:
    sequence_heads = range(batch * heads)
    factors = [[[keep_factor(seed, p, n, i, j) for j in range(keys)] for i in range(rows)] for n in sequence_heads]
    return torch.tensor(factors).reshape(batch, heads, rows, keys)


# The mask of a call --------------------------------------------------------------------------------------------------


def mask_of_dense(p: float, seed: int | Tensor | None, backend: str = "tiled") -> Tensor:
    """Equal scores and values that are unit vectors: `out[b, h, i, j]` is the factor of p[i, j] over Sk."""
    q, k = torch.zeros(B, HQ, SQ, 4), torch.zeros(B, HKV, SK, 4)
    v = torch.eye(SK).expand(B, HKV, SK, SK)
    return flashtile.attention(q, k, v, dropout_p=p, dropout_seed=seed, backend=backend) * SK


def mask_of_packed(p: float, seed: int, backend: str, page_size: int | None = None) -> Tensor:
    q, k, v = torch.zeros(B * SQ, HQ, 4), torch.zeros(B * SK, HKV, 4), torch.eye(SK).repeat(B, 1)
    v = v[:, None].expand(-1, HKV, -1)
    arguments = {"cu_seqlens_q": offsets(*[SQ] * B), "cu_seqlens_k": offsets(*[SK] * B)}
    if page_size is not None:
        pages_each = -(-SK // page_size)
        spare = pages_each * page_size - SK
        k, v = (torch.nn.functional.pad(x.unflatten(0, (B, SK)), (0, 0, 0, 0, 0, spare)) for x in (k, v))
        k, v = (x.flatten(0, 1).unflatten(0, (-1, page_size)) for x in (k, v))
        arguments["page_table"] = torch.arange(B * pages_each, dtype=torch.int32).reshape(B, pages_each)
    out = flashtile.attention_varlen(q, k, v, **arguments, dropout_p=p, dropout_seed=seed, backend=backend)
    return out.unflatten(0, (B, SQ)).transpose(1, 2) * SK


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123's known answers for philox4x32-7
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_known_answers(counter: tuple, key: tuple, words: tuple) -> None:
    as_tensors = tuple(torch.tensor(n) for n in counter), tuple(torch.tensor(n) for n in key)
    assert tuple(int(word) for word in rng.philox(*as_tensors)) == words
    assert philox(counter, key) == words


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["dense", "packed", "pages of 1", "pages of 16"])
def test_mask_on_every_backend_and_layout(layout: str, backend: str) -> None:
    expected = expected_mask(SEED, 0.3)
    if layout == "dense":
        mask = mask_of_dense(0.3, SEED, backend)
    else:
        page_size = {"packed": None, "pages of 1": 1, "pages of 16": 16}[layout]
        mask = mask_of_packed(0.3, SEED, backend, page_size)
    torch.testing.assert_close(mask, expected)


@pytest.mark.parametrize("block", [(1, 1), (2, 3), (4, 8), (5, 11), (64, 64)])
def test_mask_in_tiles_of_any_size(block: tuple[int, int]) -> None:
    with tile_size(*block, scores=1):
        torch.testing.assert_close(mask_of_dense(0.3, SEED), expected_mask(SEED, 0.3))


# sequence 0, head 0; then sequence 1, head 2
COMMITTED = (0xB9AB5908, 0x4E0E4A43, 0x3F511A33, 0x007534D1, 0x2C849F16, 0x6339FFAA)


def test_committed_mask() -> None:
    """A table that does not change with this file's own generator: 32 keys of rows 0 to 2, bit j for key j."""
    kept = {(0, 0): COMMITTED[:3], (1, 2): COMMITTED[3:]}
    mask = mask_of_dense(0.5, 20240229)
    for (b, h), rows in kept.items():
        for i, bits in enumerate(rows):
            assert sum(int(mask[b, h, i, j] > 0) << j for j in range(32)) == bits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
def test_seeds(seed: int, backend: str) -> None:
    """All 64 bits count; a negative seed is the unsigned one with the same bits; a tensor means what its int means."""
    expected = expected_mask(seed % 2**64, 0.5)
    torch.testing.assert_close(mask_of_dense(0.5, seed, backend), expected)
    signed = seed - 2**64 if seed >= 2**63 else seed
    for shape in ((), (1,), (1, 1)):
        torch.testing.assert_close(mask_of_dense(0.5, torch.full(shape, signed), backend), expected)


def test_default_seed_comes_from_the_default_generator() -> None:
    torch.manual_seed(3)
    first, second = mask_of_dense(0.5, None), mask_of_dense(0.5, None)
    torch.manual_seed(3)
    again = mask_of_dense(0.5, None)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_no_dropout_draws_no_seed() -> None:
    """A model in eval mode leaves the generator alone."""
    state = torch.get_rng_state()
    mask_of_dense(0.0, None)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", [2**-18, 2**-17, 1e-5, 0.1, 0.25, 0.9, 0.99998])
def test_threshold(p: float, backend: str) -> None:
    """`t = round(p * 65536)`, and the kept are scaled by exactly what the rounded threshold drops."""
    t = round(p * 65536)
    mask = mask_of_dense(p, SEED, backend)
    torch.testing.assert_close(mask, expected_mask(SEED, p))
    kept = mask[mask > 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 65536 / (65536 - t)))
    assert t > 0 or bool((mask > 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_probability_that_rounds_to_1_drops_everything(backend: str) -> None:
    """`t = 65536`: no half reaches it."""
    assert not mask_of_dense(0.999995, SEED, backend).any()


def test_share_of_the_kept() -> None:
    """Within five standard deviations, over rows and over keys: no part of the counter is without effect."""
    p, n = 0.3, 64
    q, k, v = torch.zeros(4, 4, n, 1), torch.zeros(4, 4, n, 1), torch.eye(n).expand(4, 4, n, n)
    kept = flashtile.attention(q, k, v, dropout_p=p, dropout_seed=11) > 0
    for dims in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)):
        share = kept.double().mean(dims)
        sigma = math.sqrt(p * (1 - p) * share.numel() / kept.numel())
        assert ((share - (1 - p)).abs() < 5 * sigma).all()


def test_heads_rows_and_sequences_have_masks_of_their_own() -> None:
    masks = (mask_of_dense(0.5, SEED) > 0).flatten(0, 2)  # [B * HQ * SQ, SK]
    assert len(masks.unique(dim=0)) == len(masks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_regenerates_the_mask(backend: str) -> None:
    """out is linear in v, so dv shows the mask that backward used."""
    q, k = torch.zeros(B, HQ, SQ, 4), torch.zeros(B, HQ, SK, 4)
    v = torch.eye(SK).expand(B, HQ, SK, SK).clone().requires_grad_()
    out = flashtile.attention(q, k, v, dropout_p=0.4, backend=backend)
    (dv,) = torch.autograd.grad(out, v, torch.eye(SQ, SK).expand_as(out))
    torch.testing.assert_close(dv[..., :SQ].transpose(-1, -2), out.detach())


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_acts_after_normalisation(backend: str) -> None:
    """Probabilities are dropped after the denominator has been formed: lse does not change."""
    with_dropout, without = (dense_case(dropout_p=p, dropout_seed=1).run(backend) for p in (0.5, 0.0))
    assert torch.equal(with_dropout["lse"], without["lse"])
    assert not torch.equal(with_dropout["out"], without["out"])


def test_seed_tensor_is_read_when_the_call_runs() -> None:
    """So that a captured graph can change it."""
    seed = torch.tensor([1])
    first = mask_of_dense(0.5, seed)
    seed += 1
    assert torch.equal(mask_of_dense(0.5, seed), mask_of_dense(0.5, 2))
    assert not torch.equal(first, mask_of_dense(0.5, seed))
