"""Packed and paged calls as a GPU runs them: lengths and pages stay there, and wrong ones name keys that do not exist.

Run on the CPU here, by telling the package that the host may not read (`checking.lengths_on_the_device`).
"""

from unittest import mock

import pytest
import torch
from checking import BACKENDS, assert_right, lengths_on_the_device, tile_size
from hypothesis import given, settings
from hypothesis import strategies as st
from no_reads import NoReads
from packing import TOTAL_K, in_pages, packed_case
from torch import Tensor

import flashtile
from flashtile.api.normalize import normalize
from flashtile.backend.tiled import entry as kernels
from flashtile.call.call import Needs
from flashtile.call.problem import Problem
from flashtile.dispatch.planner import plan
from flashtile.testing.case import Case
from flashtile.testing.generate import random_case


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=settings().max_examples // 3)
@given(seed=st.integers(0, 2**32 - 1), block=st.sampled_from([16, 48, 512]))
def test_random_calls_with_lengths_on_the_device(backend: str, seed: int, block: int) -> None:
    """The way of a GPU, where lengths and pages are never read back."""
    with lengths_on_the_device(), tile_size(block, block):
        assert_right(random_case(seed, function="attention_varlen"), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("entry", [-1, -(2**31), 9, 2**31 - 1])
def test_page_outside_the_tensor_holds_no_keys(entry: int, backend: str) -> None:
    """The keys of that page do not exist, as if a mask hid them."""
    paged, _ = in_pages(packed_case(causal=True), page_size=3)
    assert paged.arguments["k"].shape[0] == 9
    hidden = torch.ones(4, 1, 1, paged.arguments["page_table"].shape[1] * 3, dtype=torch.bool)
    hidden[0, ..., 3:6] = False
    expected = Case(paged.function, paged.arguments | {"mask": hidden}, paged.dout, paged.dlse).run(backend)
    paged.arguments["page_table"][0, 1] = entry
    with lengths_on_the_device():
        results = paged.run(backend)
    for name, x in results.items():
        torch.testing.assert_close(x, expected[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("last", [TOTAL_K + 5, 2**31 - 1])
def test_offsets_outside_the_tensor_name_no_keys(last: int, backend: str) -> None:
    """The tokens past the end are keys that do not exist, and no memory is touched there."""
    case = packed_case(cu_seqlens_k=torch.tensor([0, 7, 11, 11, last], dtype=torch.int32))
    with lengths_on_the_device():
        results = case.run(backend)
    expected = packed_case(cu_seqlens_k=torch.tensor([0, 7, 11, 11, TOTAL_K], dtype=torch.int32)).run(backend)
    for name, x in results.items():
        torch.testing.assert_close(x, expected[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_falling_offsets_are_empty_sequences(backend: str) -> None:
    """No error can be raised for them."""
    with lengths_on_the_device():
        out, lse = flashtile.attention_varlen(
            *(packed_case().arguments[name] for name in ("q", "k", "v")),
            torch.tensor([0, 5, 3], dtype=torch.int32),
            torch.tensor([0, 7, 2], dtype=torch.int32),
            return_lse=True,
            backend=backend,
        )
    assert not out[5:].any()
    assert (lse[:, 5:] == -torch.inf).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("paged", [False, True])
def test_device_lengths_are_never_read(paged: bool) -> None:
    """Forward and backward of the tiled backend itself, below the operator that would hide its operations."""
    case = in_pages(packed_case(), 3)[0] if paged else packed_case()
    tensors = {name: x for name, x in case.arguments.items() if isinstance(x, Tensor)}
    optional = dict.fromkeys(("mask", "bias", "alibi_slopes", "sinks", "seqused_k", "page_table"))
    keywords = dict.fromkeys(("window", "scale", "softcap", "score_mod", "dropout_seed", "deterministic"))
    call = normalize("attention_varlen", optional | tensors, **keywords, causal=True, dropout_p=0.5, backend="tiled")
    chosen = plan(Problem.describe(call), torch.device("cpu"), "tiled")
    with lengths_on_the_device(), NoReads(), mock.patch.object(Tensor, "tolist", side_effect=AssertionError):
        out, lse = kernels.forward(chosen, call)
        gradients = kernels.backward(chosen, call, Needs(True, True, True), out, lse, case.dout, case.dlse)
    assert gradients.q.isfinite().all()
