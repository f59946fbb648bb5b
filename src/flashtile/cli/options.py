"""Shared options and printing of results."""

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from ..call.check import DTYPES

NAMED_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


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


class Dtype(click.Choice):
    """A dtype by its name in torch."""

    def __init__(self) -> None:
        super().__init__(tuple(NAMED_DTYPES))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> torch.dtype:
        return value if isinstance(value, torch.dtype) else NAMED_DTYPES[super().convert(value, param, ctx)]


class Folder(click.ParamType):
    """A folder in which files can be made, here and now; it is made where there is none."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        try:
            Path(value).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=value).close()
        except OSError as error:
            self.fail(f"{value!r} cannot be written: {error.strerror}", param, ctx)
        return Path(value)


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


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")(command)


def print_json(value: Any) -> None:
    click.echo(json.dumps(representable(value), indent=2))


def print_table(table: Table) -> None:
    """Print a table with all its columns: a terminal that is too narrow wraps the lines."""
    console = Console()
    full_width = Console(width=10_000).measure(table).maximum
    Console(width=max(console.width, full_width)).print(table)


def representable(value: Any) -> Any:
    """A value that JSON can represent: NaN and infinities become strings."""
    if isinstance(value, dict):
        return {str(key): representable(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [representable(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)
