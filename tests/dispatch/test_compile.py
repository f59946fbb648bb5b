"""torch.compile and torch.export around a call: one graph, the same numbers, and no compiling again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import offsets
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._dynamo.utils import counters

import flashtile
from flashtile import ArgumentError, MaskMod, ScoreMod
from flashtile.backend.cpu import entry, launch
from flashtile.call.call import DIFFERENTIABLE, Call, Settings, Tensors
from flashtile.compat.flash_attn import flash_attn_varlen_func
from flashtile.dispatch import operators

B, HQ, HKV, SQ, SK, D = 2, 4, 2, 12, 20, 8
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def dense_leaves(seqlen_q: int = SQ, seqlen_k: int = SK) -> list[Tensor]:
    return [leaf(B, HQ, seqlen_q, D), leaf(B, HKV, seqlen_k, D, seed=1), leaf(B, HKV, seqlen_k, D, seed=2)]


def results(function: Callable[..., Any], *leaves: Tensor) -> list[Tensor]:
    """Results of a function, and the gradients of its leaves."""
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(x.square().sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(total, leaves)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


weight = leaf(HQ, seed=3)
MOD = ScoreMod(lambda score, b, h, i, j, w: score * w[h] + 0.1 * (i - j), (weight,))
MASK = MaskMod(lambda b, h, i, j, n: (j < n[b]) & (i - j < 9 + h), (torch.tensor([SK, 4]),))
SCORED = ScoreMod(lambda score, b, h, i, j, w: score * w[h], (weight.detach(),))
CU_Q, CU_K = offsets(5, 0, 7), offsets(9, 3, 8)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flashtile.attention(q, k, v, causal=True, return_lse=True)


def with_features(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor, sinks: Tensor) -> Any:
    features = {"bias": bias, "alibi_slopes": slopes, "sinks": sinks, "softcap": 5.0, "window": (4, 4)}
    return flashtile.attention(q, k, v, **features)


def with_score_mod(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return flashtile.attention(q, k, v, score_mod=MOD) + 0 * w.sum()


def with_mask_function(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flashtile.attention(q, k, v, mask=MASK, score_mod=SCORED)


def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flashtile.attention(q, k, v, dropout_p=0.3, dropout_seed=5)


def on_one_tensor(x: Tensor) -> Any:
    return flashtile.attention(x, x, x, causal=True)


def on_views_of_one_tensor(x: Tensor) -> Any:
    q, k, v = x.unflatten(-1, (3, D)).unbind(-2)
    return flashtile.attention(q, k, v)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flashtile.attention_varlen(q, k, v, CU_Q, CU_K, max_seqlen_q=7, max_seqlen_k=9, return_lse=True)


def feature_leaves() -> list[Tensor]:
    return [*dense_leaves(), leaf(1, HQ, 1, SK), leaf(HQ), leaf(HQ)]


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], list[Tensor]]]] = {
    "plain": (plain, dense_leaves),
    "features": (with_features, feature_leaves),
    "score_mod": (with_score_mod, lambda: [*dense_leaves(), weight]),
    "mask function": (with_mask_function, dense_leaves),
    "dropout": (with_dropout, dense_leaves),
    "one tensor": (on_one_tensor, lambda: [leaf(B, HQ, SQ, D)]),
    "views of one tensor": (on_views_of_one_tensor, lambda: [leaf(B, HQ, SQ, 3 * D)]),
    "varlen": (packed, lambda: [leaf(12, HQ, D), leaf(20, HKV, D), leaf(20, HKV, D)]),
}


@pytest.mark.parametrize(  # `test_inductor` has the plain call
    ("name", "dynamic"),
    [(name, name in ("mask function", "varlen")) for name in FUNCTIONS if name != "plain"] + [("features", True)],
)
def test_one_graph_same_numbers(name: str, dynamic: bool) -> None:
    function, leaves = FUNCTIONS[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for x, y in zip(results(compiled, *leaves()), results(function, *leaves()), strict=True):
        torch.testing.assert_close(x, y)  # gradients of one tensor may be added up in another order


def test_inductor() -> None:
    """The default compiler once, on a block with operations around the call, each of which g++ compiles for seconds."""

    def block(x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, HQ, D)).permute(2, 0, 3, 1, 4)
        return torch.sin(flashtile.attention(q, k, v, causal=True).transpose(1, 2).flatten(2))

    leaves = [leaf(B, SQ, 3 * HQ * D)]
    expected, found = results(block, *leaves), results(torch.compile(block, fullgraph=True), *leaves)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_default_seed_is_drawn_inside_the_graph() -> None:
    """Each run of a compiled call has a mask of its own, and torch.manual_seed reproduces it."""
    q, k, v = (x.detach() for x in dense_leaves())
    compiled = torch.compile(lambda: flashtile.attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    first, second = compiled(), compiled()
    torch.manual_seed(1)
    assert torch.equal(compiled(), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("told", "function"),
    [("ScoreMod", {"score_mod": lambda score, b, h, i, j: score}), ("MaskMod", {"mask": lambda b, h, i, j: i > j})],
)
def test_bare_functions_say_what_to_write(told: str, function: dict[str, Any]) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flashtile.attention(q, k, v, **function)

    with pytest.raises((ArgumentError, torch._dynamo.exc.Unsupported), match=told):
        torch.compile(call, fullgraph=True, backend="eager")(*dense_leaves())


def test_bare_functions_run_between_graphs() -> None:
    """Made anew for each call, with other numbers, and with a gradient for what they read. Only the first compiles."""
    counter = CompileCounterWithBackend("aot_eager")

    def block(x: Tensor, w: Tensor, factor: float) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score * w[h] + factor * (i - j)

        q, k, v = (x * n for n in (1, 2, 3))
        return flashtile.attention(q, k, v, score_mod=score_mod, mask=lambda b, h, i, j: j <= i + factor) * 4

    compiled = torch.compile(block, backend=counter)
    for factor in (1.0, 2.0, 3.0, 4.0, 5.0):
        leaves = [leaf(B, HQ, SQ, D), leaf(HQ, seed=3)]
        found, expected = (results(lambda *x, f=f: f(*x, factor), *leaves) for f in (compiled, block))  # noqa: B023
        assert_same(found, expected)
        assert counter.frame_count <= 4  # before and after, for the first number and for all others


def test_lengths_that_change_compile_once_more() -> None:
    """The first new length makes the graph dynamic; after that, no length compiles again."""
    counter = CompileCounter()
    compiled = torch.compile(plain, fullgraph=True, backend=counter)
    for seqlen in (10, 11, 13, 40, 41, 300):
        inputs = dense_leaves(seqlen, seqlen + 2)
        assert_same(list(compiled(*inputs)), list(plain(*inputs)))
    assert counter.frame_count <= 2


def with_numbers(n: Any, m: Any) -> dict[str, Any]:
    """Every numeric setting of a dense call."""
    scalars = {"scale": 1 / n, "softcap": n / 7, "dropout_p": 1 / n, "dropout_seed": 3}
    return scalars | {"window": (m // 3, m // 4), "attention_chunk": m // 2, "num_splits": m // 8}


@pytest.mark.parametrize("packed", [False, True])
def test_numbers_that_follow_from_a_length(packed: bool) -> None:
    """They stay symbols: one program for all lengths."""
    counter = CompileCounterWithBackend("aot_eager")

    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Any:
        if packed:
            return flashtile.attention_varlen(q, k, v, cu, cu, max_seqlen_q=len(q), max_seqlen_k=len(q), scale=len(q))
        return flashtile.attention(q, k, v, **with_numbers(q.shape[2], q.shape[2]))

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for seqlen in (20, 21, 40, 77):
        inputs = [leaf(seqlen, HQ, D).detach()] * 3 if packed else dense_leaves(seqlen, seqlen)
        assert torch.equal(compiled(*inputs, offsets(9, seqlen - 9)), call(*inputs, offsets(9, seqlen - 9)))
    assert counter.frame_count == 2


@pytest.mark.parametrize("function", [flashtile.attention_varlen, flash_attn_varlen_func])
def test_longest_sequence_that_is_computed_in_the_graph(function: Callable[..., Tensor]) -> None:
    """As packing in transformers and TRL does."""

    def call(x: Tensor, cu: Tensor) -> Any:
        longest = (cu[1:] - cu[:-1]).max().item()
        return function(x, x, x, cu, cu, max_seqlen_q=longest, max_seqlen_k=longest)

    counter = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled, x = torch.compile(call, fullgraph=True, backend=counter), leaf(20, HQ, D).detach()
        for lengths in ((9, 11), (3, 17), (20, 0)):
            assert torch.equal(compiled(x, offsets(*lengths)), call(x, offsets(*lengths)))
    assert counter.frame_count == 1


def test_computed_numbers_are_checked_when_the_program_runs() -> None:
    q, k, v = (x.detach() for x in dense_leaves())

    def call(reals: Tensor, integers: Tensor) -> Any:
        scale, softcap, dropout_p = (x.item() for x in reals)
        chunk, num_splits = (x.item() for x in integers)
        reals_of_call = {"scale": scale, "softcap": softcap, "dropout_p": dropout_p, "dropout_seed": 1}
        return flashtile.attention(q, k, v, attention_chunk=chunk, num_splits=num_splits, **reals_of_call)

    def inputs(**other: float) -> tuple[Tensor, Tensor]:
        x = {"scale": 0.3, "softcap": 2.0, "dropout_p": 0.5, "attention_chunk": 7, "num_splits": 2} | other
        return torch.tensor([*x.values()][:3]).double(), torch.tensor([*x.values()][3:])

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for given in (
            inputs(),
            inputs(scale=-1.0, softcap=0.0, dropout_p=0.0, attention_chunk=0),
            inputs(attention_chunk=2**40, num_splits=3),
        ):
            assert torch.equal(compiled(*given), call(*given))
        for name, values in {
            "scale": (1e300, float("nan")),
            "softcap": (-1.0, float("inf")),
            "dropout_p": (1.0, -0.5),
            "attention_chunk": (-1,),
            "num_splits": (0, -2),
        }.items():
            for value in values:
                with pytest.raises(ArgumentError, match=f"`{name}` is"):
                    compiled(*inputs(**{name: value}))


def test_lengths_of_packed_sequences_never_compile_again() -> None:
    """They are values of a tensor; only the number of tokens and of sequences is part of a shape."""
    counter = CompileCounter()
    q, k, v = leaf(12, HQ, D), leaf(20, HKV, D), leaf(20, HKV, D)

    def call(cu_q: Tensor, cu_k: Tensor) -> Any:
        return flashtile.attention_varlen(q, k, v, cu_q, cu_k)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for lengths_q, lengths_k in (((5, 7), (9, 11)), ((12, 0), (1, 19)), ((6, 6), (10, 10))):
        arguments = offsets(*lengths_q), offsets(*lengths_k)
        assert torch.equal(compiled(*arguments), call(*arguments))
    assert counter.frame_count == 1


def test_growing_decode_plans_once_for_each_bucket() -> None:
    """A cache that grows by one key a step: plans change with the power of two, and the graph with nothing."""
    counter = CompileCounter()
    q, (_, k, v) = leaf(B, HQ, 1, D).detach(), (x.detach() for x in dense_leaves(1, 300))
    compiled = torch.compile(lambda k, v: flashtile.attention(q, k, v, causal=True), dynamic=True, backend=counter)
    flashtile.dispatch.fast_path.forget()
    for seqlen_k in range(100, 300, 7):
        compiled(k[:, :, :seqlen_k], v[:, :, :seqlen_k])
    assert counter.frame_count == 1
    assert flashtile.dispatch.planner._plan.cache_info().misses == 3  # up to 128, 256 and 512 keys


def test_seed_and_scale_that_change() -> None:
    """A seed in a tensor is data. (A new Python number is a new graph, or a dynamic one.)"""
    counter = CompileCounter()
    q, k, v = (x.detach() for x in dense_leaves())

    def call(seed: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for seed in range(4):
        assert torch.equal(compiled(torch.tensor([seed])), call(torch.tensor([seed])))
    assert counter.frame_count == 1


@pytest.mark.parametrize(("name", "backend"), [("plain", "tiled"), ("plain", "reference"), ("score_mod", "tiled")])
def test_compiled_autograd(name: str, backend: str) -> None:
    """There the backward operator runs below autograd: what it differentiates itself must not be lost."""
    q, k, v = (x.detach() for x in dense_leaves())

    def loss(q: Tensor) -> Tensor:
        score_mod = MOD if name == "score_mod" else None
        return flashtile.attention(q, k, v, score_mod=score_mod, backend=backend).square().sum()

    x = q.clone().requires_grad_()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss(x).backward()
    torch.testing.assert_close(x.grad, torch.func.grad(loss)(q))


def traced(*functions: Callable[..., Any]) -> list[str]:
    """Those that Dynamo has looked into."""
    return [f.__name__ for f in functions if eval_frame._debug_get_cache_entry_list(f.__code__)]


def test_compiled_autograd_does_not_look_into_a_backend() -> None:
    """Dynamo breaks on what it finds there, such as the first launch of a kernel of Triton's, and does not look into a
    repeated call.
    """
    expected = None
    counters.clear()
    for _ in range(4):
        leaves = tuple(x.detach().requires_grad_() for x in dense_leaves())
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            flashtile.attention(*leaves, backend="cpu").sum().backward()
        assert traced(entry.backward) == []
        assert all("Repeated.gradients" in reason for reason in counters["graph_break"])
        expected = expected or torch.autograd.grad(flashtile.attention(*leaves, backend="cpu").sum(), leaves)
        torch.testing.assert_close(tuple(x.grad for x in leaves), expected)


@pytest.mark.parametrize("after_a_break", [False, True])
def test_dynamo_does_not_look_into_what_an_operator_does(after_a_break: bool) -> None:
    """Neither in a frame that it traces, nor in those that run when it has given up on one."""
    q, k, v = (x.detach() for x in dense_leaves())
    call, needs = Call(Tensors(q, k, v), Settings(scale=0.3)), [name in ("q", "k", "v") for name in DIFFERENTIABLE]

    def run() -> list[Tensor]:
        if after_a_break:
            torch._dynamo.graph_break()
        out, lse = operators.run_forward(call)
        return [out, lse, *operators.run_backward(needs, out, lse, out, lse, call)[:3]]  # type: ignore[list-item]

    assert_same(torch.compile(run, backend="eager")(), run())
    assert traced(operators.plan_call, entry.forward, entry.backward, launch.run) == []


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_func_grad_is_refused_or_right(fullgraph: bool, recwarn: pytest.WarningsRecorder) -> None:
    """PyTorch can not differentiate an operator by torch.func inside a graph. It says so, or leaves the graph (from
    torch 2.15 on, unless that is forbidden), and never gives zeros.
    """
    q, k, v = (x.detach() for x in dense_leaves())
    gradient = torch.func.grad(lambda q: flashtile.attention(q, k, v, backend="cpu").sum())
    found, refusal = None, ""
    try:
        found = torch.compile(gradient, fullgraph=fullgraph, backend="aot_eager")(q)
    except RuntimeError as error:
        refusal = str(error)
    assert "setup_context" in refusal or not fullgraph
    if "setup_context" not in refusal:
        torch.testing.assert_close(found, gradient(q))
    assert traced(operators.plan_call, entry.forward, entry.backward, launch.run) == []
    assert not [x for x in recwarn if "flashtile" in str(x.message)]


def test_export() -> None:
    """Non-strict export keeps the call as one operator."""

    class Block(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flashtile.attention(q, k, v, causal=True)

    inputs = tuple(x.detach() for x in dense_leaves())
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = ({}, {2: length}, {2: length})
    exported = torch.export.export(Block(), inputs, dynamic_shapes=shapes, strict=False)
    assert sum("flashtile.attention_forward" in str(node.target) for node in exported.graph.nodes) == 1
    longer = tuple(x.detach() for x in dense_leaves(SQ, SK + 11))
    assert torch.equal(exported.module()(*longer), Block()(*longer))


def test_export_of_a_causal_mask_function() -> None:
    """One program for equal and different numbers of rows and keys."""
    mask = flashtile.mask_mods.causal()

    class Block(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flashtile.attention(q, k, v, mask=mask)

    rows, keys = (torch.export.Dim(name, min=2, max=4096) for name in ("rows", "keys"))
    shapes = ({2: rows}, {2: keys}, {2: keys})
    for seqlen_k in (SQ, SQ + 11):
        inputs = tuple(x.detach() for x in dense_leaves(SQ, seqlen_k))
        exported = torch.export.export(Block(), inputs, dynamic_shapes=shapes, strict=False)
        for lengths in ((SQ, SQ), (SQ, SQ + 11), (SQ + 11, SQ)):
            others = tuple(x.detach() for x in dense_leaves(*lengths))
            torch.testing.assert_close(exported.module()(*others), Block()(*others))
