"""Types of options, errors of commands, and printing of results."""

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..as_arch import ARCHITECTURES
from ..call.check import DTYPES

Options = argparse.ArgumentParser | argparse._MutuallyExclusiveGroup
NAMED_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class CommandError(Exception):
    """The command cannot do what it was asked for; the message is all that is printed."""

    exit_code = 1


class UsageError(CommandError):
    """Options that do not go together."""

    exit_code = 2


def option(parser: Options, *names: str, help: str = "", **settings: Any) -> None:  # noqa: A002
    """Add an option whose help ends with its default, where it has one."""
    default = settings.get("default")
    if default is not None and default != []:
        help = f"{help} [default: {default}]".strip()  # noqa: A001
    parser.add_argument(*names, help=help.replace("%", "%%"), **settings)


def flag(parser: Options, *names: str, **settings: Any) -> None:
    parser.add_argument(*names, action="store_true", **settings)


def json_option(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--json", dest="as_json", help="Print JSON and nothing else.")


def arch_option(parser: argparse.ArgumentParser) -> None:
    option(
        parser,
        "--as-arch",
        choices=ARCHITECTURES,
        help="Compile Triton kernels for this older architecture, to PTX that the driver compiles for the GPU.",
    )


def install_arch(arch: str | None) -> None:
    """Obey `--as-arch`, before the first call."""
    if arch is not None:
        from ..as_arch import install

        try:
            install(arch)
        except RuntimeError as error:
            raise CommandError(str(error)) from None


# Types ----------------------------------------------------------------------------------------------------------------


def device(text: str) -> torch.device:
    """A device on which a tensor can be made, here and now."""
    try:
        found = torch.device(text)
        torch.zeros(1, device=found).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} does not work here: {str(error).splitlines()[0]}") from None
    return found


def dtype(text: str) -> torch.dtype:
    """A dtype by its name in torch."""
    if text not in NAMED_DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(NAMED_DTYPES)}")
    return NAMED_DTYPES[text]


def folder(text: str) -> Path:
    """A folder in which files can be made, here and now; it is made where there is none."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=text).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    return Path(text)


def input_file(text: str) -> Path:
    """A file that is there."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return Path(text)


def output_file(text: str) -> Path:
    """A file that can be written, here and now; its content stays."""
    path = Path(text)
    there = path.exists()
    try:
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    return path


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """An integer from `least` on, up to `most` if that is given."""

    def parsed(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
        if value < least or (most is not None and value > most):
            limit = f"from {least} to {most}" if most is not None else f"of at least {least}"
            raise argparse.ArgumentTypeError(f"{text} is no integer {limit}")
        return value

    return parsed


def number(least: float, *, above: bool = False) -> Callable[[str], float]:
    """A number from `least` on, or `above` it."""

    def parsed(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not (value > least if above else value >= least):
            raise argparse.ArgumentTypeError(f"{text} is no number {'above' if above else 'of at least'} {least:g}")
        return value

    return parsed


# Results --------------------------------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    print(json.dumps(representable(value), indent=2))


def representable(value: Any) -> Any:
    """A value that JSON can represent: NaN and infinities become strings."""
    if isinstance(value, dict):
        return {str(key): representable(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [representable(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)
