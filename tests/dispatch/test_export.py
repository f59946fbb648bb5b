"""Programs that leave Python: AOTInductor's packages, TorchScript's traces, ONNX."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checking import offsets
from torch import Tensor

import flashtile
from flashtile import MaskMod, ScoreMod, private_torch

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


def randn(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(shape, device=device)


def inputs_of_all(device: str) -> dict[str, tuple[Tensor, ...]]:
    cu = offsets(5, 7).to(device)
    lengths = torch.tensor([3, 9], dtype=torch.int32, device=device)
    cache = tuple(randn(2, 2, n, 8, device=device) for n in (16, 16, 1, 1))
    return {
        "dense": (randn(2, 4, 12, 8, device=device), *(randn(2, 2, 12, 8, device=device) for _ in range(2))),
        "packed": (randn(12, 4, 8, device=device), *(randn(12, 2, 8, device=device) for _ in range(2)), cu),
        "cache": (randn(2, 4, 1, 8, device=device), *cache, lengths),
    }


class AllCalls(torch.nn.Module):
    """A call of each operator, without tensors of functions and with some."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.score_mod = ScoreMod(lambda s, b, h, i, j, w: s * w[h], (torch.linspace(0.5, 2, 4, device=device),))
        self.mask = MaskMod(lambda b, h, i, j, n: j < n[h], (torch.tensor([9, 3, 4, 5], device=device),))

    def forward(self, dense: Any, packed: Any, cache: Any) -> list[Tensor]:
        q, k_cache, v_cache, k, v, lengths = cache
        given: dict[str, Any] = {"cache_seqlens": lengths, "k": k, "v": v}
        out = []
        functions: list[dict[str, Any]] = [{}, {"score_mod": self.score_mod, "mask": self.mask}]
        for more in functions:
            out.append(flashtile.attention(*dense, **more))
            varlen: Any = flashtile.attention_varlen
            out.append(varlen(*packed, packed[-1], **more))
            of_cache = {name: x for name, x in more.items() if name == "score_mod"}
            out.append(flashtile.attention_with_kvcache(q, k_cache, v_cache, **given, **of_cache))
        return out


def exported(module: AllCalls, inputs: dict[str, Any]) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module, (), inputs, strict=False)


class WithEmptyLists(torch.fx.Interpreter):
    """Run a program with an empty list where a call captures no tensors, as programs that were exported earlier."""

    num_empty = 0

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = getattr(target, "_schema", None)
        names = [] if schema is None else [argument.name for argument in schema.arguments]
        if "score_mod_tensors" in names and args[n := names.index("score_mod_tensors")] is None:
            args = (*args[:n], [], *args[n + 1 :])
            self.num_empty += 1
        return super().call_function(target, args, kwargs)


def test_programs_that_were_exported_earlier() -> None:
    module, inputs = AllCalls("cpu"), inputs_of_all("cpu")
    expected, program = module(**inputs), exported(module, inputs)
    runner = WithEmptyLists(program.module())
    for x, y in zip(runner.run(*private_torch.tree_leaves(inputs)), expected, strict=True):
        torch.testing.assert_close(x, y)
    assert runner.num_empty > 0


@pytest.mark.parametrize("name", ["dense", "packed"])
def test_jit_trace(name: str, tmp_path: Path) -> None:
    """Traced with gradients on, as it is mostly called; saved, loaded, and called with other lengths."""
    call = {
        "dense": lambda q, k, v: flashtile.attention(q, k, v, causal=True).square(),
        "packed": lambda q, k, v, cu: flashtile.attention_varlen(q, k, v, cu, cu, causal=True).square(),
    }[name]
    example = inputs_of_all("cpu")[name]
    traced = torch.jit.trace(call, tuple(x.requires_grad_(x.is_floating_point()) for x in example))
    torch.jit.save(traced, str(tmp_path / "traced.pt"))
    loaded = torch.jit.load(str(tmp_path / "traced.pt"))
    longer = [torch.cat([x, x], -2 if name == "dense" else 0) for x in example[:3]]
    leaves = [x.detach().requires_grad_() for x in longer]
    others = (offsets(5, 7, 12),) if name == "packed" else ()
    results = []
    for function in (loaded, call):
        out = function(*leaves, *others)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("device", DEVICES)
def test_aoti(device: str, tmp_path: Path) -> None:
    """A package of AOTInductor, loaded and called, here and with other values."""
    module, inputs = AllCalls(device), inputs_of_all(device)
    package = torch._inductor.aoti_compile_and_package(
        exported(module, inputs),
        package_path=str(tmp_path / "calls.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
    )
    loaded = torch._inductor.aoti_load_package(package)
    for _ in range(2):
        inputs = inputs_of_all(device)
        for x, y in zip(loaded(**inputs), module(**inputs), strict=True):
            torch.testing.assert_close(x, y)
