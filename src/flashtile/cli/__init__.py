"""The command line, `flashtile COMMAND`. Nothing else imports this package, nor click."""

from typing import Any

import click

from .. import __version__, processes
from ..errors import AttentionError
from .bench import bench
from .build_kernels import build_kernels
from .env import env
from .explain import explain
from .report import report
from .soak import soak
from .tune import tune
from .verify import verify


class Refused(click.ClickException):
    """An error of a call, shown as a message without a traceback."""

    exit_code = 2


class Commands(click.Group):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "ladder":
            ctx.fail("the ladder is a package of its own: pip install flashtile-ladder, then flashtile-ladder")
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with processes.ended_by_signals():
                return super().invoke(ctx)
        except AttentionError as error:
            raise Refused(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="flashtile")
def main() -> None:
    """Exact attention for PyTorch: what runs on this machine, why, and whether it is right."""


for command in (env, explain, verify, bench, report, tune, soak, build_kernels):
    main.add_command(command)
