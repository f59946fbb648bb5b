"""A process that runs the cases whose names it reads, one JSON line each, and answers with one JSON line each."""

import inspect
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from flashtile.errors import AttentionError

from .stand_ins import SkippedError, parameters_of
from .suites import SUITES, MissingError, Suite, difference, load


def tests_of(module: Any, suite: Suite) -> dict[str, Any]:
    """Tests that need nothing but their parameters."""
    found = {}
    for name, test in vars(module).items():
        if name.startswith("test_") and callable(test) and parameters_of(test).runs and name not in suite.left_out:
            given = {x for names, _ in parameters_of(test) for x in names}
            if set(inspect.signature(test).parameters) <= given:
                found[name] = test
    return found


def outcome_of(test: Any, case: dict[str, Any]) -> tuple[str, str]:
    try:
        test(**case)
    except SkippedError:
        return "skipped", ""
    except (AttentionError, MissingError) as error:
        return "refused", f"{place_of(error, test)} {str(error).splitlines()[0]}"
    except AssertionError as error:
        return "wrong", f"{place_of(error, test)} {' '.join(str(error).split())[:150]}"
    except torch.OutOfMemoryError:
        return "out of memory", ""
    except Exception as error:
        return "crashed", f"{place_of(error, test)} {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "passed", ""


def place_of(error: Exception, test: Any) -> str:
    """The test's line that has raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    file = inspect.unwrap(test).__code__.co_filename
    return next((f"{Path(file).name}:{x.lineno} {x.line}:" for x in reversed(frames) if x.filename == file), "")


def main() -> None:
    name, source, device = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what tests print
    suite = SUITES[name]
    tests = tests_of(load(suite, Path(source), device), suite)
    sizes = {name: [len(values) for _, values in parameters_of(test)] for name, test in tests.items()}
    print(json.dumps(sizes), file=answers)
    for line in sys.stdin:
        test, chosen = json.loads(line)
        parameters = parameters_of(tests[test])
        values = [values[n] for (_, values), n in zip(parameters, chosen, strict=True)]
        case = parameters.case(values)
        torch.manual_seed(0)
        longest = max((x for x in case.values() if type(x) is int), default=0)
        described = ", ".join(f"{x}={value}" for x, value in case.items())
        print(json.dumps([described, longest]), file=answers)
        if sys.stdin.readline() == "run\n":
            outcome, reason = outcome_of(tests[test], case)
            known = difference(case, reason) if outcome not in ("passed", "skipped") else None
            print(json.dumps(("named", known) if known else (outcome, reason)), file=answers)


if __name__ == "__main__":
    main()
