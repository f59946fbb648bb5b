"""Steps 7 and 8 of the ladder in Numba's simulator and Triton's interpreter, which have to be switched on before Numba
or Triton is imported. Run as

    TRITON_INTERPRET=1 python interpreted.py CASES RESULTS

CASES is a file of `torch.save` with a list of (module, arguments of `attention`); RESULTS gets the list of results.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def main(cases: str, results: str) -> None:
    found = []
    for module, arguments in torch.load(cases):
        step = importlib.import_module(f"flashtile.ladder.{module}")
        found.append(step.attention(**arguments))
    torch.save(found, results)


def interpreted(calls: list[tuple[str, dict[str, Any]]], folder: Path, **variables: str) -> list[Any]:
    """The results of `attention` of (module, arguments), in a process with these environment variables."""
    torch.save(calls, folder / "cases")
    command = [sys.executable, __file__, str(folder / "cases"), str(folder / "results")]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    assert result.returncode == 0, result.stderr
    return torch.load(folder / "results")


if __name__ == "__main__":
    main(*sys.argv[1:])
