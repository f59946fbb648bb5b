"""Compare "tile_attention" with "eager" in outputs and gradients, with padding on both sides, for every architecture.

    PYTHONPATH=src:tests python -m architectures --out FILE.csv

Weights are random and configurations small (`sizes.py`); those that cannot be made so, or do not run with "eager", are
counted as such. "sdpa" is compared too where a model accepts it: where it differs as much, the difference is the
model's own. With 16 bits both are compared with "eager" in float32.
"""

import argparse
import csv
import importlib
import inspect
import math
import pkgutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from integrations.tiny_models import randomize
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedModel

from flashtile.integrations.transformers import NAME, check, register
from flashtile.integrations.transformers.attention import tile_attention

from .sizes import LENGTH, inputs_of, small

WORSE, SHARE = 3, 0.9  # times the error of "eager" with 16 bits; of elements, as a token may be sent to another expert
LARGEST, TOLERANCE, GRADIENT_TOLERANCE = 20_000_000, 2e-4, 2e-3


UNTESTED = ("no small configuration", "not run by eager")


class Row(NamedTuple):
    """One model and one side of padding; relative differences from "eager"."""

    model: str
    padding: str
    result: str
    layers: int = 0
    outputs: float = 0.0
    gradients: float = 0.0
    others_outputs: float = float("nan")  # of "sdpa", or with 16 bits of "eager"
    others_gradients: float = float("nan")
    detail: str = ""


def architectures() -> Iterator[type[Any]]:
    """Model classes with a configuration of their own, at most two of each: with a head for text, and the bare one."""
    for module in pkgutil.iter_modules(transformers.models.__path__):
        package = f"transformers.models.{module.name}"
        for part in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if not part.name.startswith("modeling_"):
                continue
            try:
                models = vars(importlib.import_module(f"{package}.{part.name}")).values()
            except ImportError:
                continue
            own = [x for x in models if isinstance(x, type) and issubclass(x, PreTrainedModel)]
            own = [x for x in own if x.__module__ == f"{package}.{part.name}" and x.forward is not nn.Module.forward]
            for config in dict.fromkeys(x.config_class for x in own if x.config_class is not None):
                alike = [x for x in own if x.config_class is config]
                for ends in (("ForConditionalGeneration", "ForCausalLM", "MTModel", "LMHeadModel"), ("Model",)):
                    first = [x for x in alike if x.__name__.endswith(ends) and "PreTrained" not in x.__name__]
                    yield from first[:1]


def reads_mask(kind: type[Any]) -> bool:
    """Whether there is padding to try."""
    return {"input_ids", "attention_mask"} <= inspect.signature(kind.forward).parameters.keys()


def use(model: nn.Module, implementation: str) -> None:
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation(implementation)


def results(model: nn.Module, inputs: dict[str, Tensor], mask: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs at tokens that count, and gradients of their random projection."""
    model.zero_grad()
    torch.manual_seed(0)
    out = model(**inputs)
    causes = {name: x for name, x in out.items() if "past" not in name} if hasattr(out, "items") else {"out": out}
    decoder = "decoder_input_ids" in inputs
    found = []
    for name, value in causes.items():
        for x in tree_leaves(value):
            if not isinstance(x, Tensor) or not x.is_floating_point() or not x.requires_grad:
                continue
            of_source = not decoder or name.startswith("encoder")
            of_tokens = x.dim() > 2 and x.shape[:2] in ((2, LENGTH), (2, LENGTH + 1))  # a class token may be the last
            padded = mask is not None and of_source and of_tokens
            found.append(x[:, :LENGTH][mask.bool()] if padded and mask is not None else x)
    draw = torch.Generator().manual_seed(2)
    loss = sum((x * torch.randn(x.shape, generator=draw)).sum() for x in found)
    assert isinstance(loss, Tensor), "no output has a gradient"
    loss.backward()
    return [x.detach() for x in found], [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]


def difference(a: list[Tensor], b: list[Tensor], share: float = 1.0) -> float:
    """The largest difference of this share of a tensor's elements, relative to the largest element of all."""
    largest = max(float(x.abs().max()) for x in b if x.numel())
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return float("inf")
    gaps = [
        float((x.float() - y).abs().flatten().kthvalue(math.ceil(share * x.numel())).values)
        for x, y in zip(a, b, strict=True) if x.numel()
    ]  # fmt: skip
    return max(gaps) / max(largest, 1e-30) if all(g == g for g in gaps) else float("inf")


def of_dtype(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def compared(kind: type[Any], side: str | None, dtype: torch.dtype) -> Row:
    name, padding = kind.__name__, side or "none"
    try:
        config = small(kind.config_class)
        with torch.device("meta"):
            size = sum(x.numel() for x in kind(config).parameters())
        if size > LARGEST:
            return Row(name, padding, "no small configuration", detail=f"{size} parameters")
        torch.manual_seed(0)
        model = randomize(kind(config)).to(dtype)
    except Exception as error:
        return Row(name, padding, "no small configuration", detail=f"{type(error).__name__}: {error}"[:200])
    try:
        given, mask = inputs_of(model, side)
        inputs = of_dtype(given, dtype)
        use(model, "eager")
        outputs, gradients = results(model, inputs, mask)
        gradients = [x.clone() for x in gradients]
        if not outputs or not all(x.isfinite().all() for x in outputs):
            return Row(name, padding, "not run by eager", detail="outputs are not finite")
    except Exception as error:
        return Row(name, padding, "not run by eager", detail=f"{type(error).__name__}: {error}"[:200])
    called: set[nn.Module] = set()

    def counted(module: nn.Module, *arguments: Any, **more: Any) -> Any:
        called.add(module)
        return tile_attention(module, *arguments, **more)

    try:
        use(model, NAME)
        with mock.patch.dict(AttentionInterface._global_mapping, {NAME: counted}):
            ours, our_gradients = results(model, inputs, mask)
        gaps = (difference(ours, outputs), difference(our_gradients, gradients))
    except Exception as error:
        return Row(name, padding, "error", len(called), detail=f"{type(error).__name__}: {error}"[:300])
    said = {row.layer for row in check(model) if row.runs}
    unsaid = {x for x, module in model.named_modules() if module in called} - said
    detail = f"check() does not name {sorted(unsaid)[:2]}" if unsaid else ""
    if not called:
        return Row(name, padding, "no layer calls it" if gaps == (0, 0) else "differs", 0, *gaps, detail=detail)
    if detail:
        return Row(name, padding, "differs from check()", len(called), *gaps, detail=detail)
    if dtype is not torch.float32:
        use(model, "eager")
        exact, exact_gradients = results(model.float(), of_dtype(given, torch.float32), mask)
        gaps = difference(ours, exact, SHARE), difference(our_gradients, exact_gradients, SHARE)
        reference = difference(outputs, exact, SHARE), difference(gradients, exact_gradients, SHARE)
        near = all(x <= WORSE * y + TOLERANCE for x, y in zip(gaps, reference, strict=True))
        return Row(name, padding, "agrees" if near else "differs", len(called), *gaps, *reference)
    if gaps[0] <= TOLERANCE and gaps[1] <= GRADIENT_TOLERANCE:
        return Row(name, padding, "agrees", len(called), *gaps)
    try:
        use(model, "sdpa")
        theirs, their_gradients = results(model, inputs, mask)
        reference = (difference(theirs, outputs), difference(their_gradients, gradients))
    except Exception as error:
        return Row(name, padding, "differs", len(called), *gaps, detail=f"sdpa: {type(error).__name__}: {error}"[:200])
    alike = all(x <= 3 * y + 1e-6 for x, y in zip(gaps, reference, strict=True))
    return Row(name, padding, "differs as sdpa does" if alike else "differs", len(called), *gaps, *reference)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--only", default="", help="part of a class's name")
    parser.add_argument("--out", type=Path, help="a table, a row for each model and side")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no model after this time")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    register()
    rows, end = [], time.monotonic() + options.seconds
    for kind in architectures():
        if options.only not in kind.__name__ or time.monotonic() > end:
            continue
        for side in (None, "right", "left"):
            rows.append(compared(kind, side, getattr(torch, options.dtype)))
            if rows[-1].result in ("error", "differs", "differs from check()"):
                print(*rows[-1], sep="; ", flush=True)
            if rows[-1].result in UNTESTED or not reads_mask(kind):
                break
    if options.out is not None:
        with options.out.open("w", newline="") as file:
            csv.writer(file).writerows([Row._fields, *rows])
    print(dict(Counter(row.result for row in rows)), "of", len({row.model for row in rows}), "models")
    return any(row.result in ("error", "differs", "differs from check()") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
