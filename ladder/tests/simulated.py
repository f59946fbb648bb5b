"""Run steps 7 and 8 of the ladder in Numba's simulator and Triton's interpreter, in a process of their own: both are
switched on before Numba or Triton is imported.

    TRITON_INTERPRET=1 python simulated.py CASES RESULTS

CASES is a file of `torch.save` with a list of (module, arguments of `attention`); RESULTS gets the list of results,
with gradients where `dout` is an argument. The module "exercise" stands for the judge: its argument is the number of an
exercise, and its results are the words for the solution and for the first known mistake.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from flashtile_ladder.exercises import EXERCISES, Exercise
from flashtile_ladder.exercises.judge import judge


def main(cases: str, results: str) -> None:
    attended = []
    for module, arguments in torch.load(cases):
        if module == "exercise":
            attended.append(judged(EXERCISES[arguments["name"]]))
            continue
        step = importlib.import_module(f"flashtile_ladder.{module}")
        dout, tiles = arguments.pop("dout", None), arguments.pop("tiles", None)
        found = step.attention(**arguments)
        if dout is not None:
            q, k, v, *mask = (arguments[name] for name in ("q", "k", "v", "causal", "scale"))
            found += step.backward(q, k, v, *found, dout, *mask, tiles=tiles)
        attended.append(found)
    torch.save(attended, results)


def judged(exercise: Exercise) -> list[str]:
    sources = exercise.source(), exercise.with_mistake(exercise.mistakes[0])
    return [judge(exercise, exercise.compiled(source)).text for source in sources]


def run_simulated(calls: list[tuple[str, dict[str, Any]]], folder: Path, **variables: str) -> list[Any]:
    """Return the results of `attention` for each (module, arguments), with these environment variables."""
    torch.save(calls, folder / "cases")
    command = [sys.executable, __file__, str(folder / "cases"), str(folder / "results")]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    assert result.returncode == 0, result.stderr
    return torch.load(folder / "results")


if __name__ == "__main__":
    main(*sys.argv[1:])
