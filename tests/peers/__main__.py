"""Run a peer's own tests: `PYTHONPATH=src:tests python -m peers --suite fa2 --source CHECKOUT --cases 150`.

CHECKOUT is a folder with the peer's repository. Its test files run as they are, but for device names on a CPU, through
`flashtile.compat.install()`. Cases are drawn at random: a test, then each of its parameters. Those that a test skips
are drawn again. Each shard runs cases in a process of its own; one that dies or hangs costs its case alone.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from .suites import SUITES

ROOT = Path(__file__).parents[2]
DRAWS = 20  # for each case that runs, at most
OUTCOMES = ("passed", "named", "wrong", "refused", "crashed", "out of memory", "timed out")


class Worker:
    """A process of `peers.worker`, and a limit for each answer."""

    def __init__(self, arguments: list[str], limit: float):
        path = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "peers.worker", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self.limit, self.late = limit, False
        self.errors: list[str] = []
        threading.Thread(target=lambda: self.errors.extend(self.process.stderr or []), daemon=True).start()

    def ask(self, line: str | None) -> Any:
        """The answer to a line; `None` if the process has ended, or has taken too long."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        timer = threading.Timer(self.limit, self.end_late)
        timer.start()
        try:
            if line is not None:
                self.process.stdin.write(line + "\n")
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        timer.cancel()
        return json.loads(answer) if answer else None

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def end_late(self) -> None:
        self.late = True
        self.process.kill()


class Run:
    """Cases that shards draw from one sequence, and their results."""

    def __init__(self, arguments: list[str], cases: int, seed: int, longest: int, limit: float, end: float):
        self.arguments = arguments
        self.random, self.lock = random.Random(seed), threading.Lock()
        self.missing, self.draws = cases, cases * DRAWS
        self.longest, self.limit, self.end = longest, limit, end
        self.seen: set[str] = set()
        self.results: list[tuple[str, str, str]] = []  # outcome, case, reason

    def draw(self, sizes: dict[str, list[int]]) -> str | None:
        with self.lock:
            while self.missing > 0 and self.draws > 0 and time.monotonic() < self.end:
                self.draws -= 1
                tests = sorted(sizes)
                test = self.random.choices(tests, [1 + sum(n > 1 for n in sizes[x]) for x in tests])[0]
                line = json.dumps([test, [self.random.randrange(n) for n in sizes[test]]])
                if line not in self.seen:
                    self.seen.add(line)
                    return line
        return None

    def shard(self) -> None:
        worker, sizes = None, None
        while time.monotonic() < self.end:
            if worker is None:
                worker = Worker(self.arguments, self.limit)
                sizes = worker.ask(None)
                if sizes is None:
                    worker.process.wait()
                    raise SystemExit(f"{self.arguments} cannot be imported:\n{''.join(worker.errors[-12:])}")
            line = self.draw(sizes or {})
            if line is None:
                break
            described, longest = worker.ask(line)
            if longest > self.longest:
                worker.tell("no")
                continue
            with self.lock:
                self.missing -= 1
            answer = worker.ask("run")
            outcome, reason = answer or (("timed out", "") if worker.late else ("crashed", "the process has ended"))
            if answer is None:
                worker = None
            self.record(outcome, f"{json.loads(line)[0]}({described})", reason)
        if worker is not None:
            worker.process.kill()

    def record(self, outcome: str, case: str, reason: str) -> None:
        with self.lock:
            if outcome == "skipped":
                self.missing += 1
                return
            self.results.append((outcome, case, reason))
            if outcome not in ("passed", "named"):
                print(f"{outcome}: {case}\n  {reason}", flush=True)


@click.command()
@click.option("--suite", type=click.Choice([*SUITES]), multiple=True, help="By default all.")
@click.option("--source", type=click.Path(exists=True, path_type=Path), required=True, help="A checkout of the peer.")
@click.option("--cases", default=150, show_default=True, help="Of each suite.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--shards", default=1, show_default=True, help="Processes that run cases at the same time.")
@click.option("--seconds", default=float("inf"), help="No case begins after this time, of each suite.")
@click.option("--case-seconds", default=180.0, show_default=True, help="A case that takes longer is ended.")
@click.option("--longest", type=int, help="Longest sequence. By default 800 on a CPU.")
def main(
    suite: tuple[str, ...], source: Path, cases: int, device: str, seed: int, shards: int, seconds: float,
    case_seconds: float, longest: int | None,
) -> None:  # fmt: skip
    """Exit code 1 if a result was wrong, a case crashed, or one was refused that docs/switching.md does not name."""
    rows, failed = [], False
    for name in suite or SUITES:
        most = longest if longest is not None else 800 if device == "cpu" else sys.maxsize
        run = Run([name, str(source), device], cases, seed, most, case_seconds, time.monotonic() + seconds)
        threads = [threading.Thread(target=run.shard) for _ in range(shards)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = Counter(outcome for outcome, _, _ in run.results)
        rows.append(f"| {name} | {len(run.results)} | " + " | ".join(str(counts[x]) for x in OUTCOMES) + " |")
        failed |= counts["passed"] + counts["named"] < len(run.results) or not run.results
        for (outcome, reason), n in Counter((o, r) for o, _, r in run.results if o != "passed").most_common():
            print(f"{name}: {n} {outcome}: {reason}")
        for test, reason in SUITES[name].left_out.items():
            print(f"{name}: {test} is left out: {reason}")
    print("| suite | cases | " + " | ".join(OUTCOMES) + " |\n" + "|---" * (len(OUTCOMES) + 2) + "|")
    print("\n".join(rows))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
