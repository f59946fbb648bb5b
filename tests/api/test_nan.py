"""Rows that see nothing, NaN and infinities: where they may spread and where they must not."""

import pytest
import torch
from blind import BLIND
from checking import BACKENDS, assert_right, dense_case, tile_size

import flashtile
from flashtile.testing.case import Case
from flashtile.testing.poison import poisoned_allocation, with_guard_bands

INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sinks", [None, (0.5, -INF)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("cause", BLIND)
def test_rows_that_see_nothing(cause: str, sinks: tuple | None, backend: str) -> None:
    """out is 0, lse is -inf or the sink, and no gradient flows but the one from lse to the sink."""
    case = dense_case(**BLIND[cause] | ({} if sinks is None else {"sinks": torch.tensor(sinks)}))
    with tile_size(4, 4):
        results = case.run(backend)
        assert_right(case, backend)
    if sinks is None:
        blind = results["lse"] == -INF
    else:
        blind = results["lse"] == torch.tensor(sinks)[:, None]
        reached = torch.where(blind, case.dlse, 0.0).sum(dim=(0, 2))
        if bool(blind.all()):
            torch.testing.assert_close(results["dsinks"], torch.where(torch.tensor(sinks) == -INF, 0.0, reached))
    assert blind.any()
    assert not results["out"][blind].any()
    assert not results["dq"][blind].any()
    assert all(x.isfinite().all() for name, x in results.items() if name != "lse")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cause", ["mask of one row", "mask function of one row", "bias of -inf", "score_mod of -inf"])
def test_nan_cotangent_of_a_row_that_sees_nothing(cause: str, backend: str) -> None:
    """Nothing flows through such a row, so it does not matter what arrives there: `lse.exp()` and the like make NaN."""
    case = dense_case(**BLIND[cause])
    clean = case.run(backend)
    case.dlse[:, :, 1] = NAN
    assert all(torch.equal(clean[name], x) for name, x in case.run(backend).items())


@pytest.mark.parametrize("backend", ["cpu", *BACKENDS])
@pytest.mark.parametrize("sinks", [(INF, 0.0), (-INF, INF)], ids=str)
def test_infinite_sinks(sinks: tuple, backend: str) -> None:
    """A sink of +inf takes all the weight: out 0, lse +inf. A sink of -inf is no sink."""
    case = dense_case(sinks=torch.tensor(sinks))
    assert_right(case, backend)
    results = case.run(backend)
    takes_all = torch.tensor(sinks) == INF
    assert (results["lse"][:, takes_all] == INF).all()
    assert not any(results[name][:, takes_all].any() for name in ("out", "dq"))
    torch.testing.assert_close(results["dsinks"][takes_all], case.dlse.sum(dim=(0, 2))[takes_all])
    assert all(x.isfinite().all() for name, x in results.items() if name != "lse")


@pytest.mark.parametrize("backend", BACKENDS)
def test_sink_of_minus_infinity_is_no_sink(backend: str) -> None:
    with_sinks = dense_case(sinks=torch.full((2,), -INF)).run(backend)
    assert not with_sinks.pop("dsinks").any()
    without = dense_case().run(backend)
    assert all(torch.equal(without[name], x) for name, x in with_sinks.items())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q", "k"])
def test_nan_reaches_the_rows_that_see_it_and_no_other(name: str, backend: str) -> None:
    """In out and lse, with tiles that hold both kinds of rows."""
    case, clean = dense_case(causal=True), dense_case(causal=True)
    case.arguments[name][0, 0, 4, 0] = NAN
    case.forward_only = clean.forward_only = True
    with tile_size(4, 4):
        results, expected = case.run(backend), clean.run(backend)
    rows = torch.arange(7)
    sees = torch.zeros(2, 2, 7, dtype=torch.bool)
    if name == "q":
        sees[0, 0] = rows == 4
    else:
        sees[0, :] = rows >= 4 - 2  # key 4 is visible from row 4 - (Sk - Sq) on, in both heads that share it
    for result in ("out", "lse"):
        assert results[result][sees].isnan().all()
        assert torch.equal(results[result][~sees], expected[result][~sees])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_v_stays_in_its_sequence_and_head(backend: str) -> None:
    case, clean = dense_case(num_heads_kv=2), dense_case(num_heads_kv=2)
    case.arguments["v"][1, 0, 3, 2] = NAN
    results, expected = case.run(backend), clean.run(backend)
    others = torch.ones(2, 2, dtype=torch.bool)
    others[1, 0] = False
    assert results["out"][1, 0, :, 2].isnan().all()
    assert torch.equal(results["lse"], expected["lse"])
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(results[name][others], expected[name][others])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_special_values_follow_ieee_arithmetic(name: str, value: float, backend: str) -> None:
    """NaN and infinities in the same places as the oracle's, visible or not.

    Gradients of an infinite key have no finite error bound, so only its forward is compared.
    """
    for position in (0, 8 if name != "q" else 6):
        case = dense_case(causal=True, forward_only=name == "k" and value in (INF, -INF))
        case.arguments[name][0, 0, position, 1] = value
        with tile_size(4, 4):
            assert_right(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [INF, NAN])
def test_bias_follows_ieee_arithmetic(value: float, backend: str) -> None:
    case = dense_case(bias=torch.zeros(1, 1, 7, 9), causal=True)
    case.arguments["bias"][0, 0, 3, 2] = value  # visible
    case.arguments["bias"][0, 0, 0, 8] = value  # not visible
    case.forward_only = True
    with tile_size(4, 4):
        assert_right(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_keys_may_hold_anything(backend: str) -> None:
    """A key hidden from every row changes neither out nor lse; in v it may reach rows of its head."""
    hidden = torch.arange(9) == 5
    case, clean = (dense_case(mask=~hidden[None, None, None], forward_only=True) for _ in range(2))
    case.arguments["k"][:, :, 5] = NAN
    case.arguments["bias"] = torch.where(hidden, NAN, 0.0)[None, None, None]
    results, expected = case.run(backend), clean.run(backend)
    assert all(torch.equal(expected[name], results[name]) for name in ("out", "lse"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_do_not_depend_on_uninitialized_memory(backend: str) -> None:
    for arguments in ({}, BLIND["causal, more queries than keys"], {"seqlen_k": 0}, {"sinks": torch.ones(2)}):
        clean = dense_case(**arguments).run(backend)
        with poisoned_allocation():
            poisoned = dense_case(**arguments).run(backend)
        assert all(torch.equal(clean[name], x) for name, x in poisoned.items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_around_the_inputs_is_read_or_written(backend: str) -> None:
    case = dense_case(causal=True, bias=torch.randn(1, 2, 1, 9), mask=torch.rand(2, 1, 7, 9) < 0.8)
    expected = case.run(backend)
    guarded = {name: with_guard_bands(x) for name, x in case.arguments.items() if isinstance(x, torch.Tensor)}
    arguments = case.arguments | {name: g.tensor for name, g in guarded.items()}
    results = Case("attention", arguments, case.dout, case.dlse).run(backend)
    assert all(g.intact() for g in guarded.values())
    assert all(torch.equal(expected[name], x) for name, x in results.items())


def test_inputs_are_not_changed() -> None:
    case = dense_case(causal=True, bias=torch.randn(1, 2, 1, 9), sinks=torch.randn(2))
    before = {name: x.clone() for name, x in case.arguments.items() if isinstance(x, torch.Tensor)}
    case.run("tiled")
    assert all(torch.equal(case.arguments[name], x) for name, x in before.items())


def test_out_and_lse_are_tensors_of_their_own() -> None:
    """Not views of a larger buffer: results keep no other memory alive, and can be resized or exported."""
    q = torch.randn(2, 2, 5, 8)
    out, lse = flashtile.attention(q, q, q, return_lse=True)
    assert out.untyped_storage().nbytes() == out.numel() * 4
    assert lse.untyped_storage().nbytes() == lse.numel() * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_arrives_at_a_row_that_sees_nothing_goes_no_further(backend: str) -> None:
    q, k, v = (torch.randn(1, 1, n, 4).requires_grad_() for n in (3, 2, 2))
    mask = torch.tensor([True, False, True])[None, None, :, None]
    out, lse = flashtile.attention(q, k, v, mask=mask, return_lse=True, backend=backend)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    dout[:, :, 1], dlse[:, :, 1] = torch.nan, torch.nan
    found = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
    expected = torch.autograd.grad((out, lse), (q, k, v), (dout.nan_to_num(), dlse.nan_to_num()))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
