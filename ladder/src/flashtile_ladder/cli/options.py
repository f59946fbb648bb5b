"""Options of the command, and its printing of results."""

import json
import math
from pathlib import Path
from typing import Any

import click
import torch


class Device(click.ParamType):
    """A device on which a tensor can be made, here and now."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> torch.device:
        try:
            device = torch.device(value)
            torch.zeros(1, device=device).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            self.fail(f"{value!r} does not work here: {str(error).splitlines()[0]}", param, ctx)
        return device


class OutputFile(click.ParamType):
    """A file that can be written, here and now; its content stays."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        there = path.exists()
        try:
            path.open("ab").close()
            if not there:
                path.unlink()
        except OSError as error:
            self.fail(f"{value!r} cannot be written: {error.strerror}", param, ctx)
        return path


def print_json(value: Any) -> None:
    click.echo(json.dumps(representable(value), indent=2))


def representable(value: Any) -> Any:
    """A value that JSON can represent: NaN and infinities become strings."""
    if isinstance(value, dict):
        return {str(key): representable(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [representable(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)
