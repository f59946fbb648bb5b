"""Packed and paged sequences: each is a dense call of its own, and nothing else in the tensors matters."""

from typing import Any

import pytest
import torch
from checking import BACKENDS, assert_right, changed_during_calls, dense_case, features, offsets, tile_size
from packing import HQ, LENGTHS_K, LENGTHS_Q, TOTAL_K, TOTAL_Q, in_pages, packed_case
from torch import Tensor

from flashtile.testing.case import Case


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_is_a_loop_of_dense_calls(causal: bool | str, backend: str) -> None:
    packed = packed_case(causal=causal, softcap=2.0)
    results = packed.run(backend)
    cu_q, cu_k = (packed.arguments[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for b in range(len(LENGTHS_Q)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        arguments: dict[str, Any] = {"causal": causal, "softcap": 2.0}
        for name, part in (("q", rows), ("k", keys), ("v", keys)):
            arguments[name] = packed.arguments[name][part].transpose(0, 1)[None]
        dout, dlse = packed.dout[rows].transpose(0, 1)[None], packed.dlse[None, :, rows]
        alone = Case("attention", arguments, dout, dlse).run(backend)
        torch.testing.assert_close(results["lse"][:, rows], alone["lse"][0])
        for name, part in (("out", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
            torch.testing.assert_close(results[name][part], alone[name][0].transpose(0, 1))


@pytest.mark.parametrize("name", features())
def test_sequences_of_one_length_are_a_dense_batch(name: str) -> None:
    """Positions, sequence and head mean the same in both layouts: dropout, ALiBi, bias and score_mod agree."""
    dense = dense_case(**features()[name])
    batch, _, seqlen_q, _ = dense.arguments["q"].shape
    seqlen_k = dense.arguments["k"].shape[2]
    packed = {n: dense.arguments[n].transpose(1, 2).flatten(0, 1) for n in ("q", "k", "v")}
    packed |= {"cu_seqlens_q": offsets(*[seqlen_q] * batch), "cu_seqlens_k": offsets(*[seqlen_k] * batch)}
    packed |= {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
    dout, dlse = dense.dout.transpose(1, 2).flatten(0, 1), dense.dlse.transpose(0, 1).flatten(1)
    with tile_size(4, 4):
        expected = dense.run("tiled")
        results = Case("attention_varlen", dense.arguments | packed, dout, dlse).run("tiled")
    torch.testing.assert_close(results["lse"], expected["lse"].transpose(0, 1).flatten(1))
    for n in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(results[n], expected[n].transpose(1, 2).flatten(0, 1))
    for n in expected.keys() - {"lse", "out", "dq", "dk", "dv"}:
        torch.testing.assert_close(results[n], expected[n])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_pages_are_the_keys_in_another_order(page_size: int, backend: str) -> None:
    packed = packed_case(causal=True)
    paged, tokens = in_pages(packed, page_size)
    expected, results = packed.run(backend), paged.run(backend)
    for name in ("out", "lse", "dq"):
        torch.testing.assert_close(results[name], expected[name])
    for name in ("dk", "dv"):
        used = sum(LENGTHS_K)
        torch.testing.assert_close(results[name].flatten(0, 1)[tokens[:used]], expected[name][:used])
        unused = torch.ones(len(results[name].flatten(0, 1)), dtype=torch.bool)
        unused[tokens[:used]] = False
        assert not results[name].flatten(0, 1)[unused].any()  # and no NaN of an unused page


def poisoned(case: Case) -> Case:
    """The case with NaN in everything that is no query and no key of a sequence."""
    arguments = {name: x.clone() if isinstance(x, Tensor) else x for name, x in case.arguments.items()}
    used_q, used_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    arguments["q"][used_q:] = arguments["k"][used_k:] = arguments["v"][used_k:] = torch.nan
    dout, dlse = case.dout.clone(), case.dlse.clone()
    dout[used_q:] = dlse[:, used_q:] = torch.nan
    seqused = arguments.get("seqused_k")
    if seqused is not None:
        for start, end, n in zip(offsets(*LENGTHS_K), offsets(*LENGTHS_K)[1:], seqused, strict=False):
            arguments["k"][start + n : end] = arguments["v"][start + n : end] = torch.nan
    return Case(case.function, arguments, dout, dlse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seqused", [None, (7, 1, 0, 3)])
def test_tokens_of_no_sequence(seqused: tuple | None, backend: str) -> None:
    """They may hold anything; their rows give 0 and -inf, and all of them receive gradient 0."""
    used = {} if seqused is None else {"seqused_k": torch.tensor(seqused, dtype=torch.int32)}
    clean, results = (
        packed_case(causal=True, **used).run(backend),
        poisoned(packed_case(causal=True, **used)).run(backend),
    )
    assert all(torch.equal(clean[name], x) for name, x in results.items())
    used_q, used_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    assert not results["out"][used_q:].any()
    assert (results["lse"][:, used_q:] == -torch.inf).all()
    for name, first in (("dq", used_q), ("dk", used_k), ("dv", used_k)):
        assert not results[name][first:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_sees_only_itself(backend: str) -> None:
    """NaN in one sequence reaches no other."""
    case = packed_case()
    for name, length in (("q", LENGTHS_Q[0]), ("k", LENGTHS_K[0]), ("v", LENGTHS_K[0])):
        case.arguments[name][:length] = torch.nan
    results, clean = case.run(backend), packed_case().run(backend)
    for name, first in (("out", LENGTHS_Q[0]), ("dq", LENGTHS_Q[0]), ("dk", LENGTHS_K[0]), ("dv", LENGTHS_K[0])):
        assert torch.equal(results[name][first:], clean[name][first:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_of_a_sequence_end_at_seqused_k(backend: str) -> None:
    """`Sk` is seqused_k, for causal's alignment too: the same call with the keys cut off."""
    used = (3, 4, 0, 1)
    keys = torch.cat([torch.arange(n) + start for n, start in zip(used, offsets(*LENGTHS_K).tolist(), strict=False)])
    cut = packed_case(causal=True, cu_seqlens_k=offsets(*used))
    cut.arguments |= {name: cut.arguments[name][keys] for name in ("k", "v")}
    given = packed_case(causal=True, seqused_k=torch.tensor(used, dtype=torch.int32))
    for name in ("out", "lse", "dq"):
        torch.testing.assert_close(given.run(backend)[name], cut.run(backend)[name])


@pytest.mark.parametrize("backend", ["cpu", *BACKENDS])
@pytest.mark.parametrize("layout", ["packed", "used", "paged"])
def test_indices_that_change_during_a_call(layout: str, backend: str) -> None:
    """Kernels read what was checked, forward and backward."""
    case = packed_case(causal=True)
    if layout == "used":
        case.arguments["seqused_k"] = torch.tensor((3, 4, 0, 1), dtype=torch.int32)
    elif layout == "paged":
        case, _ = in_pages(case, 2)
    indices = [x for name, x in case.arguments.items() if name.startswith(("cu_", "seqused", "page_"))]
    assert len(indices) >= 2
    expected = case.run(backend)
    with changed_during_calls(indices) as entered:
        found = case.run(backend)
    assert len(entered) == 2
    assert all(torch.equal(expected[name], x) for name, x in found.items())


@pytest.mark.parametrize("change", ["int64 offsets", "larger max_seqlen", "exact max_seqlen"])
def test_forms_of_the_lengths(change: str) -> None:
    """int64 offsets and any max_seqlen that is large enough give the same bits as int32 and `None`."""
    arguments: dict[str, Any] = {"larger max_seqlen": {"max_seqlen_q": 100, "max_seqlen_k": 10**6}}.get(change, {})
    if change == "exact max_seqlen":
        arguments = {"max_seqlen_q": max(LENGTHS_Q), "max_seqlen_k": max(LENGTHS_K)}
    if change == "int64 offsets":
        arguments = {"cu_seqlens_q": offsets(*LENGTHS_Q).long(), "cu_seqlens_k": offsets(*LENGTHS_K).long()}
    expected = packed_case().run("tiled")
    assert all(torch.equal(expected[name], x) for name, x in packed_case(**arguments).run("tiled").items())


def test_bias_and_mask_broadcast_to_the_longest_sequence() -> None:
    shape = (4, HQ, max(LENGTHS_Q), max(LENGTHS_K))
    limits = {"max_seqlen_q": shape[2], "max_seqlen_k": shape[3]}
    assert_right(packed_case(bias=torch.randn(shape), mask=torch.rand(4, 1, *shape[2:]) < 0.6, **limits))
    assert_right(packed_case(bias=torch.randn(1, HQ, TOTAL_Q, TOTAL_K)))  # max_seqlen=None: all tokens


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_calls(backend: str) -> None:
    none, all_zero = offsets(), offsets(0, 0)
    for cu in (none, all_zero):
        case = packed_case(cu_seqlens_q=cu, cu_seqlens_k=cu, sinks=torch.randn(HQ))
        assert_right(case, backend)
        case.arguments |= {name: case.arguments[name][:0] for name in ("q", "k", "v")}
        assert_right(Case(case.function, case.arguments, case.dout[:0], case.dlse[:, :0]), backend)
