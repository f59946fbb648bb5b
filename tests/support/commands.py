"""Run `flashtile` in this process, as a shell would."""

import contextlib
import io
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

from flashtile.cli import main


class Result(NamedTuple):
    """`output` is what a terminal shows: both streams, as they were written."""

    exit_code: int
    output: str
    stdout: str
    stderr: str


class Stream(io.StringIO):
    """One of both streams, whose text also goes to `both`."""

    def __init__(self, both: io.StringIO) -> None:
        super().__init__()
        self.both = both

    def write(self, text: str) -> int:
        self.both.write(text)
        return super().write(text)


def invoke(words: Sequence[str]) -> Result:
    """Exit code and output of a command; an error that it does not catch is 1, with its traceback in `output`."""
    both = io.StringIO()
    out, err = Stream(both), Stream(both)
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["flashtile"]),
    ):
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception:
            code = 1
            both.write(traceback.format_exc())
    return Result(code, both.getvalue(), out.getvalue(), err.getvalue())
