"""Names, order and defaults of arguments are the originals'."""

import importlib
import inspect
import operator

import pytest
import torch
from originals import SIGNATURES


@pytest.mark.parametrize(("module", "name"), SIGNATURES)
def test_signature(module: str, name: str) -> None:
    function = operator.attrgetter(name)(importlib.import_module(f"flashtile.compat.{module}"))
    signature = inspect.signature(function)
    bare = [x.replace(annotation=inspect.Parameter.empty) for x in signature.parameters.values()]
    assert (
        str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == SIGNATURES[module, name]
    )


@pytest.mark.parametrize("name", [name for module, name in SIGNATURES if module == "torch" and "varlen" in name])
def test_the_installed_torch_has_them(name: str) -> None:
    """PyTorch of another version may have fewer arguments, in the same order."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, name):
        pytest.skip(f"PyTorch {torch.__version__} has no {name}")
    theirs = [*inspect.signature(getattr(varlen, name)).parameters]
    ours = [*inspect.signature(getattr(importlib.import_module("flashtile.compat.torch"), name)).parameters]
    assert len(theirs) > 4
    assert [x for x in ours if x in theirs] == theirs


def test_the_installed_flex_attention() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    ours = inspect.signature(importlib.import_module("flashtile.compat.torch").flex_attention).parameters
    theirs = inspect.signature(flex.flex_attention).parameters
    assert [(x.name, x.kind, x.default) for x in ours.values()] == [
        (x.name, x.kind, x.default) for x in theirs.values()
    ]


@pytest.mark.parametrize("module", ["flash_attn.flash_attn_interface", "flash_attn"])
def test_modules_have_all_names(module: str) -> None:
    functions = {name for place, name in SIGNATURES if place == "flash_attn"}
    assert functions <= set(dir(importlib.import_module(f"flashtile.compat.{module}")))
