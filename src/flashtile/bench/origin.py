"""Origin of results: versions, commit, command line. Figures without these cannot be repeated."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ..call.device import describe_device
from .clocks import clock_of
from .providers import Provider


def origin(device: torch.device, providers: list[Provider], machine: dict[str, Any]) -> dict[str, Any]:
    """Origin of results as a dict; `machine` comes from `flashtile env`."""
    facts: dict[str, Any] = {"device": device_name(device), "torch": torch.__version__, "commit": commit()}
    facts |= {"command": command_line(), "threads": torch.get_num_threads()}
    facts["versions"] = {p.name: p.version() for p in providers if p.unusable(device) is None}
    return facts | {"clocks before": clock_of(device).state(), "machine": machine}


def device_name(device: torch.device) -> str:
    return describe_device(device).name


def command_line() -> str:
    """Command line as a shell takes it, with the program's name instead of its path."""
    program = Path(sys.argv[0]).name
    return shlex.join(["flashtile" if program == "__main__.py" else program, *sys.argv[1:]])


def commit() -> str | None:
    """Commit of the package's checkout, with "+" if files have changed; `None` outside a checkout."""
    try:
        sha = git("rev-parse", "--short=12", "HEAD")
        return sha + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def git(*words: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()
