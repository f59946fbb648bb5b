"""`python -m flashtile_ladder`: the steps and what to run next; with the number or the file of a step, that step; with
the name of another file, as `related.fusion`, its program; with `exercise` or `check`, the exercises. `--emulate` runs
kernels of GPUs on the processor.
"""

import importlib
import os
import signal
import sys

from . import STEPS
from ._host.alone import FOLDER, guarded, run
from ._host.emulation import emulation

PROGRAMS = [f"{x}.{path.stem}" for x in ("measure", "related") for path in (FOLDER / x).glob("[!_]*.py")]


def listing() -> str:
    """A line for each step, and what to run first."""
    lines = ["Attention step by step. Each step is one file to read and to run:", ""]
    for step in STEPS:
        needs = f"  (needs {step.needs})" if step.needs else ""
        lines.append(f"{step.number:>3}  {step.file:28} {step.changed}{needs}")
    lines += [
        "",
        "Run the first: python -m flashtile_ladder 1",
        "A file alone:  python -m flashtile_ladder step02_floats",
        "Without a GPU: python -m flashtile_ladder --emulate 8 9",
        "Another idea:  python -m flashtile_ladder related.fusion",
        "Exercises:     python -m flashtile_ladder exercise",
    ]
    return "\n".join([*lines, "Measure all:   flashtile-ladder --help", f"The files:     {FOLDER}"])


def main(names: list[str]) -> None:
    if "--emulate" in names:
        # Read when Numba and Triton are imported, which steps do.
        os.environ |= {"NUMBA_ENABLE_CUDASIM": "1", "TRITON_INTERPRET": "1"}
        with emulation():
            main([name for name in names if name != "--emulate"])
        return
    if not names:
        print(listing())
        return
    if names[0] in ("exercise", "check"):
        from .exercises.command import main as exercises

        if names[0] == "check":
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it also within a compiled kernel
        exercises(names, prog_name="python -m flashtile_ladder")
    if names[0] in PROGRAMS:
        guarded(importlib.import_module(f".{names[0]}", __package__).main)
        return
    chosen = [step for name in names for step in STEPS if name in (str(step.number), step.module, step.file)]
    known = {name for step in STEPS for name in (str(step.number), step.module, step.file)}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no step is called {unknown[0]}. {listing()}")
    codes = []
    for step in chosen:
        print("\n" if codes else "", end="")
        codes.append(run(step.file, STEPS))
    raise SystemExit(max(codes))


if __name__ == "__main__":
    main(sys.argv[1:])
