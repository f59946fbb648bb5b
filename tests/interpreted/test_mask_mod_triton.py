"""Mask functions in the Triton kernels, in Triton's interpreter."""

import os
from dataclasses import replace

import pytest
import torch
import triton.language as tl
from checking import dense_case
from ready_masks import EXPECTED, N
from variants import VARIANTS

from flashtile.backend.gpu.captured import captured_pointers, captured_scalars
from flashtile.backend.triton.kernels.kernel import Captured, Pointer, kernel, with_captured
from flashtile.backend.triton.launch.formulas import device_function
from flashtile.expression import Formula, mask_mod_formula
from flashtile.testing.case import Case, MaskFunction, ScoreFunction
from flashtile.testing.mask_functions import allowed_distances, causal_by_head, documents, first_keys
from flashtile.testing.oracle import solve
from flashtile.testing.score_functions import tempered_table
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
ALLOWED = MaskFunction(allowed_distances, (torch.rand(4, 17, generator=torch.Generator().manual_seed(0)) < 0.7,))


@kernel
def tile_kernel(visible: Pointer, captured: Captured, mask_mod: tl.constexpr):
    """The pairs `[32, 32]` of sequence 1 and head 1 that a mask function shows."""
    rows, keys = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
    found = mask_mod(tl.program_id(0) + 1, tl.program_id(0) + 1, rows, keys, captured)[0]
    tl.store(visible + rows * 32 + keys, tl.broadcast_to(found, [32, 32]).to(tl.int32))


@pytest.mark.parametrize("name", EXPECTED)
def test_ready_masks(name: str) -> None:
    mod, expected = EXPECTED[name]
    formula, visible = mask_mod_formula(mod.key), torch.zeros(32, 32, dtype=torch.int32)
    assert isinstance(formula, Formula)
    launched = with_captured(tile_kernel, tuple(x.dim() for x in mod.tensors))[(1,)]
    launched(
        visible=visible,
        mask_mod=device_function(formula, accurate=True).function,
        **captured_pointers(mod.tensors),
        **captured_scalars(mod.tensors),
    )
    assert torch.equal(visible[:N, :N] != 0, expected.expand(2, 2, N, N)[1, 1])


def assert_right(case: Case) -> None:
    worst = compare(case.run("triton"), case, solve(case))[0]
    assert worst.ok, f"{worst}\n{case.description}"


def test_with_a_score_mod_and_all_others() -> None:
    generator = torch.Generator().manual_seed(1)
    tables = (torch.randn(4, generator=generator), torch.randn(4, 17, generator=generator))
    others = {"softcap": 2.0, "bias": torch.randn(1, 4, 7, 9), "alibi_slopes": torch.rand(4), "sinks": torch.randn(4)}
    others |= {"dropout_p": 0.3, "dropout_seed": 3, "score_mod": ScoreFunction(tempered_table, tables)}
    assert_right(dense_case(batch=1, num_heads_q=4, num_heads_kv=2, mask=ALLOWED, **others))


@pytest.mark.parametrize("name", ["packed", "paged"])
def test_packed_sequences(name: str) -> None:
    case = replace(VARIANTS[name], dtype=torch.float16, head_dim=16, heads=(4, 2)).case(2, "cpu", (1, 17, 20))
    ids = torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(0))
    case.arguments["mask"] = MaskFunction(documents, (ids,)) if name == "packed" else MaskFunction(causal_by_head)
    assert_right(case)


def test_splits_of_packed_heads_in_a_cache() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 3, 16, generator=generator)
    k, v = (torch.randn(2, 2, 67, 16, generator=generator) for _ in range(2))
    lengths = torch.tensor([67, 20], dtype=torch.int32)
    arguments = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths, "num_splits": 3, "causal": True}
    mask = MaskFunction(first_keys, (torch.tensor([50, 0]),))
    assert_right(Case("attention_with_kvcache", arguments | {"mask": mask}, q, forward_only=True))
