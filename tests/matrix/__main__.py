"""Run the tests over versions: `PYTHONPATH=src:tests python -m matrix [--only 'PyTorch 2.15'] [--environments FOLDER]`.

Each combination has a virtual environment (gigabytes for PyTorch's CUDA builds), which is removed unless a folder is
named to keep it in. Results are merged into `benchmarks/results/compatibility.json`, from which `python
docs/make_tables.py` makes the table of docs/compatibility.md.
"""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import click

from .combinations import COMBINATIONS, INTERPRETED, LEFT_OUT, TESTS, Combination
from .environments import MissingError, environment, triton

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "compatibility.json"
TIMEOUT = 1200  # seconds, of a combination's tests


@click.command()
@click.option("--only", multiple=True, help="Only combinations with this in their name. May be repeated.")
@click.option("--environments", type=click.Path(path_type=Path), help="Where environments are, and are kept.")
@click.option("--interpreter", multiple=True, help="VERSION=PATH of a Python. May be repeated.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(only: tuple[str, ...], environments: Path | None, interpreter: tuple[str, ...], out: Path) -> None:
    """Exit code 1 if a test failed. A combination that cannot run is a row with the reason."""
    given = dict(x.split("=", 1) for x in interpreter)
    rows = {tuple(row["versions"]): row for row in json.loads(out.read_text())} if out.exists() else {}
    failed = False
    for combination in COMBINATIONS:
        if only and not any(words in combination.name for words in only):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            row = row_of(combination, environments or Path(temporary), given)
        rows[combination] = row
        failed |= bool(row.get("failures")) or not row.get("hopper_kernels", "0").isdigit()
        print(f"{combination.name}: {row.get('reason') or summary(row)}", flush=True)
        ordered = [rows[x] for x in COMBINATIONS if x in rows]
        out.write_text(json.dumps(ordered, indent=1) + "\n")
    sys.exit(1 if failed else 0)


def summary(row: dict[str, Any]) -> str:
    names = "".join(f"\n  {name}" for name in row["failures"])
    return (
        f"{row['passed']} passed, {len(row['failures'])} failed, {row['skipped']} skipped in {row['seconds']} s{names}"
    )


def row_of(combination: Combination, folder: Path, given: dict[str, str]) -> dict[str, Any]:
    """The result of one combination."""
    row: dict[str, Any] = {"versions": list(combination), "date": datetime.date.today().isoformat()}
    try:
        python = environment(combination, folder, given)
        path = [str(triton(combination, python, folder)), str(ROOT / "src"), str(ROOT / "tests")]
        row |= described(python, path)
        start = time.monotonic()
        found = [tested(python, path, [*TESTS, "-k", " and ".join(f"not {name}" for name in LEFT_OUT)])]
        words = " or ".join(INTERPRETED)
        found.append(tested(python, path, ["tests/interpreted/test_interpreted.py", "-k", words], TRITON_INTERPRET="1"))
        row["hopper_kernels"] = hopper_kernels(python, path)
    except MissingError as error:
        return row | {"reason": str(error)}
    for name in ("passed", "skipped"):
        row[name] = sum(part[name] for part in found)
    row["failures"] = [name for part in found for name in part["failures"]]
    return row | {"seconds": round(time.monotonic() - start)}


def described(python: Path, path: list[str]) -> dict[str, Any]:
    """The full versions that are tested, and on what.

    Raises:
        MissingError: PyTorch or Triton cannot be imported.
    """
    code = "import platform, torch, triton; print(platform.python_version(), torch.__version__, triton.__version__)"
    ended = subprocess.run([python, "-c", code], capture_output=True, text=True, env=variables(path))
    if ended.returncode != 0:
        raise MissingError(last_line(ended.stderr))
    return {"installed": ended.stdout.split(), "machine": f"{platform.system()} {platform.machine()}"}


def variables(path: list[str], **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }


def tested(python: Path, path: list[str], arguments: list[str], **more: str) -> dict[str, Any]:
    """Counts and names of one run of pytest.

    Raises:
        MissingError: it did not end, or reported nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        more |= {"TRITON_CACHE_DIR": f"{folder}/triton", "FLASHTILE_CACHE_DIR": f"{folder}/flashtile"}
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        try:
            ended = subprocess.run(
                command, cwd=ROOT, env=variables(path, **more), capture_output=True, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            raise MissingError(f"the tests took more than {TIMEOUT} s") from None
        if not report.exists():
            raise MissingError(f"pytest ended with {ended.returncode}: {ended.stdout[-300:]}{ended.stderr[-300:]}")
        return counts(ElementTree.parse(report).getroot())


def hopper_kernels(python: Path, path: list[str]) -> str:
    """Hopper's dense kernels of all widths, compiled without a GPU: their number, or the error of the first that fails.

    Raises:
        MissingError: they take too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "benchmarks/compilers.py", f"{folder}/kernels.zip"]
        environment = variables(path, TRITON_CACHE_DIR=f"{folder}/triton")
        try:
            ended = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            raise MissingError(f"compiling Hopper's kernels took more than {TIMEOUT} s") from None
    compiled = re.search(r"(\d+) kernels", ended.stdout)
    return compiled[1] if ended.returncode == 0 and compiled else last_line(ended.stderr)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def counts(report: ElementTree.Element) -> dict[str, Any]:
    """Counts of a report of pytest in JUnit's format."""
    found: dict[str, Any] = {"passed": 0, "skipped": 0, "failures": []}
    for case in report.iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            found["failures"].append(f"{case.get('classname')}::{case.get('name')}")
        else:
            found["skipped" if "skipped" in kinds else "passed"] += 1
    return found


if __name__ == "__main__":
    main()
