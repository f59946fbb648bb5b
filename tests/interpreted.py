"""Step 8 of the ladder in Triton's interpreter, which has to be switched on before Triton is imported: run as

    TRITON_INTERPRET=1 python interpreted.py CASES RESULTS

CASES is a file of `torch.save` with a list of (module, arguments of `attention`); RESULTS gets the list of results.
"""

import importlib
import sys

import torch


def main(cases: str, results: str) -> None:
    found = []
    for module, arguments in torch.load(cases):
        step = importlib.import_module(f"flashtile.ladder.{module}")
        found.append(step.attention(**arguments))
    torch.save(found, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
