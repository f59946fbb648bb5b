"""A process that runs the cases whose names it reads, one JSON line each, and answers with one JSON line each."""

import inspect
import json
import linecache
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
    """What a case comes to, and why it has not passed: a known difference is "named"."""
    try:
        test(**case)
    except SkippedError:
        return "skipped", ""
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error):
            return "out of memory", ""
        outcome, reason = kind_of(error)
        line, local = place_of(error, test)
        known = difference(case, f"{line} {reason}", local)
        return ("named", known) if known else (outcome, f"{line} {reason}")
    return "passed", ""


def kind_of(error: Exception) -> tuple[str, str]:
    if isinstance(error, AttentionError | MissingError):
        return "refused", str(error).splitlines()[0]
    words = " ".join(str(error).split())[:200]
    return ("wrong", words) if isinstance(error, AssertionError) else ("crashed", f"{type(error).__name__}: {words}")


def place_of(error: Exception, test: Any) -> tuple[str, dict[str, Any]]:
    """The test's line that has raised an error, and its variables there."""
    file = inspect.unwrap(test).__code__.co_filename
    for frame, number in reversed([*traceback.walk_tb(error.__traceback__)]):
        if frame.f_code.co_filename == file:
            line = linecache.getline(file, number).strip()
            return f"{Path(file).name}:{number} {line}:", frame.f_locals
    return "", {}


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
            print(json.dumps(outcome_of(tests[test], case)), file=answers)


if __name__ == "__main__":
    main()
