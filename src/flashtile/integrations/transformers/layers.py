"""Which layers of a model run flashtile, and why the others do not."""

from typing import Any, NamedTuple

from torch import nn

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name by which models of transformers call AttentionInterface
OWN = "it computes attention itself, without transformers' AttentionInterface"


class Row(NamedTuple):
    """An attention layer of a model.

    Attributes:
        layer: its name in the model, as in `model.named_modules()`.
        kind: its class.
        runs: whether its attention runs in flashtile.
        reason: why it does not; empty if it does.
    """

    layer: str
    kind: str
    runs: bool
    reason: str


class Report(tuple[Row, ...]):
    """The attention layers of a model, in the order of `named_modules()`; as text, a line for each kind and reason."""

    __slots__ = ()

    def __str__(self) -> str:
        alike: dict[tuple[str, str], list[str]] = {}
        for row in self:
            alike.setdefault((row.kind, row.reason), []).append(row.layer)
        lines = [f"{sum(row.runs for row in self)} of {len(self)} attention layers run flashtile"]
        for (kind, reason), names in alike.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"  {kind}, {names[0]}{more}: {reason or 'runs flashtile'}")
        return "\n".join(lines)


def report_on(model: nn.Module, name: str) -> Report:
    """The layers that call the AttentionInterface, and others whose classes are named attention and hold none."""
    modules = dict(model.named_modules())
    calling = {path for path, module in modules.items() if calls_interface(type(module))}
    found = {path for path, module in modules.items() if "attention" in type(module).__name__.lower()} | calling
    holding = {parent for path in found for parent in parents(path)}
    rows = []
    for path, module in modules.items():
        if path in calling or path in found - holding:
            reason = reason_against(module, name) if path in calling else OWN
            rows.append(Row(path, type(module).__name__, not reason, reason))
    return Report(rows)


def parents(path: str) -> list[str]:
    """The names of the modules around one; the model's own is empty."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts))]


def calls_interface(layer: type[Any]) -> bool:
    """Whether a method of a class names the AttentionInterface, but for methods of all models."""
    bases = [base for base in layer.__mro__ if base.__module__ != "transformers.modeling_utils"]
    codes = (getattr(function, "__code__", None) for base in bases for function in vars(base).values())
    return any(code is not None and INTERFACE in code.co_names for code in codes)


def reason_against(layer: nn.Module, name: str) -> str:
    """Why a layer that calls the AttentionInterface does not get the function `name`; empty if it does."""
    config: Any = getattr(layer, "config", None)
    chosen = getattr(config, "_attn_implementation", None)
    if chosen == name:
        return ""
    kind = type(config).__name__
    return f"its {kind} has {chosen!r}: call set_attn_implementation({name!r}) of the part with that configuration"
