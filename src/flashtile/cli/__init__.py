"""The command line, `flashtile COMMAND`. Nothing else imports this package.

A command is a module with `arguments(parser)`, which declares its options, and `run(**options)`, which returns its exit
code; the docstring of `run` is its help. Commands need nothing but the library's own dependencies, and say what is
missing where they do.
"""

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__, processes
from ..errors import AttentionError
from .options import CommandError, UsageError

COMMANDS = {
    "env": "the machine as flashtile sees it",
    "doctor": "what is wrong here, and what to do; the backends of a model",
    "explain": "the plan of a call, and what limits it",
    "prepare": "compile the kernels of a workload ahead",
    "verify": "random problems against an fp64 oracle",
    "bench": "times against other libraries",
    "calibrate": "measure this GPU for the choice of kernels",
    "report": "a page about this machine",
    "soak": "calls from several threads for hours",
    "cache": "the folder of compiled kernels: show, limit, empty",
    "build-kernels": "an archive of compiled kernels",
}
MOVED = {"ladder": "the ladder is a package of its own: pip install flashtile-ladder, then flashtile-ladder"}


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run a command, and end the process with its exit code: 2 for wrong options, 1 for other failures."""
    words = sys.argv[1:] if words is None else list(words)
    if words and words[0] in MOVED:
        print(f"Error: {MOVED[words[0]]}", file=sys.stderr)
        sys.exit(2)
    parser = overview()
    if not words:
        parser.print_help()
        sys.exit(0)
    name = parser.parse_args(words[:1]).command
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    parser = argparse.ArgumentParser(
        prog=f"flashtile {name}",
        description=inspect.getdoc(module.run),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.arguments(parser)
    sys.exit(finished(module, vars(parser.parse_args(words[1:]))))


def overview() -> argparse.ArgumentParser:
    """The parser of a command's name."""
    lines = "\n".join(f"  {name:15}{words}" for name, words in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="flashtile",
        description="Exact attention for PyTorch: what runs on this machine, why, and whether it is right.",
        epilog=f"commands:\n{lines}\n\n`flashtile COMMAND --help` has the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flashtile, version {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=tuple(COMMANDS))
    return parser


def finished(module: object, options: dict[str, object]) -> int:
    """The exit code of a command. Errors of calls and of commands are messages without a traceback."""
    try:
        with processes.ended_by_signals():
            return module.run(**options) or 0  # type: ignore[attr-defined]
    except (AttentionError, CommandError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, CommandError) else UsageError.exit_code
    except KeyboardInterrupt:
        print("Aborted!", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1
