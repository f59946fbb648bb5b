"""Every private name of PyTorch stands in one module, and calls are right without it."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from modules import MODULES
from torch import Tensor

import flashtile
from flashtile import private_torch
from flashtile.call import sharding
from flashtile.dispatch import fast_path

# Modules whose private names only measurements and checks need: without one, those fail by themselves.
MEASUREMENTS = ("as_arch", "bench.", "testing.")
PRIVATE = re.compile(r"torch(\.\w+)*\._[a-z]|from torch[\w.]* import \(?_[a-z]|from torch\.utils\._|\b_cdata\b")
SOURCE = Path(private_torch.__file__).read_text()
CALLS = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.Call) and len(node.args) == 3]
NAMES = {
    tuple(x.value for x in node.args[:2]) for node in CALLS if all(isinstance(x, ast.Constant) for x in node.args[:2])
}  # type: ignore[attr-defined]
NAMES |= {("torch._C", name) for name in (*private_torch._DISPATCH_NAMES, *private_torch._STASH_NAMES)}
NAMES |= {("torch._functorch.eager_transforms", "JVP_NESTING")}
PRESENT = sorted(x for x in NAMES if hasattr(importlib.import_module(x[0]), x[1]))  # this PyTorch may lack some
ALL = [x for x in PRESENT if x[1] not in ("eager_transforms", "_current_level")]  # which PyTorch itself needs meanwhile


@contextmanager
def removed(*names: tuple[str, str]) -> Iterator[None]:
    """`private_torch` as it is where PyTorch lacks these names. PyTorch itself gets them back at once."""
    kept = [(sys.modules.get(path) or importlib.import_module(path), name) for path, name in names]
    values = [getattr(owner, name) for owner, name in kept]
    try:
        for owner, name in kept:
            delattr(owner, name)
        importlib.reload(private_torch)
    finally:
        for (owner, name), value in zip(kept, values, strict=True):
            setattr(owner, name, value)
    fast_path.forget()
    try:
        yield
    finally:
        importlib.reload(private_torch)
        fast_path.forget()


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, n, 4, generator=generator).requires_grad_() for n in (5, 7, 7)]


def calls() -> dict[str, Any]:
    """Results of calls inside modes, traces and transforms of every kind, and outside of them."""
    q, k, v = inputs()
    mask = torch.rand(3, 1, 1, 5, 7, generator=torch.Generator().manual_seed(1)) < 0.7

    def attend(*qkv: Tensor, **options: Any) -> Tensor:
        return flashtile.attention(*qkv, causal=True, **options)

    def scalar(q: Tensor) -> Tensor:
        return attend(q, k.detach(), v.detach()).square().sum()

    found: dict[str, Any] = {}
    for _ in range(3):  # checked, recorded, replayed
        out = attend(q, k, v)
        found["forward"], found["backward"] = out, torch.autograd.grad(out.square().sum(), (q, k, v))
    with torch.device("cpu"):
        found["default device"] = attend(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found["autocast"] = attend(q, k, v)
    with torch.profiler.profile():
        found["profiler"] = attend(q, k, v)
    found["second"] = torch.autograd.grad(torch.autograd.grad(scalar(q), q, create_graph=True)[0].sum(), q)
    found["grad"] = torch.func.grad(scalar)(q.detach())
    found["jvp"] = torch.func.jvp(scalar, (q.detach(),), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), torch.ones_like(q))
        found["dual"] = tuple(torch.autograd.forward_ad.unpack_dual(scalar(dual)))
    found["vmap"] = torch.func.vmap(lambda m: attend(q.detach(), k.detach(), v.detach(), mask=m, backend="tiled"))(mask)
    found["score_mod"] = attend(q, k, v, score_mod=lambda score, b, h, i, j: score * 0.5)
    found["inference"] = torch.inference_mode()(scalar)(q)
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return calls()


@pytest.mark.parametrize(("path", "name"), PRESENT)
def test_calls_are_right_without(path: str, name: str, expected: dict[str, Any]) -> None:
    with removed((path, name)):
        found = calls()
    torch.testing.assert_close(found, expected)


def test_calls_are_right_without_all_of_them(expected: dict[str, Any]) -> None:
    with removed(*ALL):
        torch.testing.assert_close(calls(), expected)


def test_the_package_is_imported_without_all_of_them() -> None:
    """Decisions at import: operators, functions that Dynamo leaves alone, and the refusal of score_mod."""
    code = """
import importlib.util, sys, torch
from pathlib import Path
names = eval(sys.argv[1])
owners = [(importlib.import_module(path), name) for path, name in names]
values = [getattr(owner, name) for owner, name in owners]
package = Path(sys.argv[2])
def load(name, file):
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=None)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
import types
parent = types.ModuleType("flashtile"); parent.__path__ = [str(package)]; sys.modules["flashtile"] = parent
import flashtile.errors
for owner, name in owners: delattr(owner, name)
load("flashtile.private_torch", package / "private_torch.py")
for (owner, name), value in zip(owners, values): setattr(owner, name, value)
del sys.modules["flashtile"]
import flashtile
q, k, v = (torch.randn(1, 2, n, 4, requires_grad=True) for n in (7, 7, 7))
compiled = torch.compile(lambda *x: flashtile.attention(*x, causal=True) * 2, backend="eager")
scores = (q @ k.mT / 2).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
expected = scores.softmax(-1) @ v * 2
for function in (compiled, lambda *x: flashtile.attention(*x, causal=True) * 2):
    out = function(q, k, v)
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), wanted)
for options in ({"backend": "reference"}, {"score_mod": lambda score, b, h, i, j: score * 2}):
    try:
        flashtile.attention(q, k, v, **options).sum().backward()
    except flashtile.AttentionError as error:
        print(error)
"""
    arguments = [repr(ALL), str(Path(flashtile.__file__).parent)]
    ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "offers no way back" in ended.stdout
    assert "no TorchDispatchMode" in ended.stdout


def test_leaves() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    tree = ([x, (y, None)], {"a": 3, "b": [x]})
    assert list(map(id, private_torch.leaves(tree))) == list(map(id, private_torch.tree_leaves(tree)))


def test_private_names_stand_in_one_module() -> None:
    used = {
        f"{name}: {line.strip()}"
        for name, path in MODULES.items()
        if name != "private_torch" and not name.startswith(MEASUREMENTS)
        for line in path.read_text().splitlines()
        if PRIVATE.search(line.partition("  #")[0]) and "torch.__version__" not in line
    }
    assert not used


def test_contexts_need_values_of_threads() -> None:
    """Without them no context opens: a recomputation by autograd's threads would not be sharded."""
    with (
        removed(("torch._C", "_is_key_in_tls")),
        pytest.raises(flashtile.AttentionError, match="inherit"),
        sharding.inside(None),
    ):
        pass
    assert not sharding.contexts_open
    assert sharding.current() is None
