"""Virtual environments of a combination, made with uv where it is installed, else with venv and pip."""

import shutil
import subprocess
import sys
from pathlib import Path

from .combinations import NEEDED, Combination


class MissingError(Exception):
    """A combination that this machine cannot run, with the reason."""


def interpreter(version: str, given: dict[str, str]) -> str:
    """An interpreter of this version: as given, this one, on the PATH, or one of pyenv's.

    Raises:
        MissingError: there is none.
    """
    candidates = [given.get(version), f"python{version}"]
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        candidates.insert(1, sys.executable)
    candidates += [str(x) for x in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for candidate in filter(None, candidates):
        found = shutil.which(candidate)
        if found is not None and reported(found) == version:
            return found
    raise MissingError(f"no Python {version}")


def reported(python: str) -> str | None:
    """The version that an interpreter says it has; `None` if it does not start."""
    code = "import sys; print(*sys.version_info[:2], sep='.')"
    ended = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return ended.stdout.strip() if ended.returncode == 0 else None


def environment(combination: Combination, folder: Path, given: dict[str, str]) -> Path:
    """The interpreter of an environment with this Python and PyTorch; made in `folder` unless it is there.

    Raises:
        MissingError: the Python is not there, or the packages cannot be installed.
    """
    place = folder / f"{combination.python}-{combination.torch}"
    python = place / "bin" / "python"
    if not (python.exists() and (place / "complete").exists()):
        base = interpreter(combination.python, given)
        if shutil.which("uv"):
            run("uv", "venv", "--quiet", "--clear", "--python", base, str(place))
        else:
            run(base, "-m", "venv", "--clear", str(place))
        install(python, [f"torch=={combination.torch}", *NEEDED])
        (place / "complete").touch()
    return python


def triton(combination: Combination, python: Path, folder: Path) -> Path:
    """A folder with the Triton of a combination alone."""
    place = folder / f"triton-{combination.python}-{combination.triton}"
    if not place.exists():
        older = ["numpy<2.4"] if combination.triton == "3.6.0" else []  # its interpreter fails with newer ones
        install(python, ["--no-deps", "--target", str(place), f"triton=={combination.triton}", *older])
    return place


def install(python: Path, arguments: list[str]) -> None:
    if shutil.which("uv"):
        run("uv", "pip", "install", "--quiet", "--python", str(python), *arguments)
    else:
        run(str(python), "-m", "pip", "install", "--quiet", *arguments)


def run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        raise MissingError((ended.stderr.strip().splitlines() or ["no output"])[-1])
