"""The command line: what it prints, in words and as JSON, and how it exits."""

import ast
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Result, invoke

from flashtile.backend import user_files
from flashtile.backend.tiled import entry, forward, support
from flashtile.dispatch import fast_path

ROOT = Path(__file__).parents[2]


def run(*words: str) -> Result:
    return invoke(words)


def run_json(*words: str) -> dict:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def broken_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiled backend loses a tenth of every tile's values."""
    right = forward.update

    def wrong(*arguments):
        state = right(*arguments)
        return state._replace(acc=state.acc * 0.9)

    monkeypatch.setattr(forward, "update", wrong)


def test_env() -> None:
    found = run_json("env")
    assert found["torch"]["version"]
    assert found["backends"]["tiled"].startswith("usable")
    text = run("env").output
    assert all(f"\n{name} " in f"\n{text}" for name in found if name != "unknown")


def test_env_says_what_it_cannot_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("not on this machine")

    module = importlib.import_module("flashtile.cli.env")
    monkeypatch.setattr(module, "PROBES", dict.fromkeys(module.PROBES, fails))
    assert set(run_json("env")["unknown"].values()) == {"OSError: not on this machine"}
    result = run("env")
    assert result.exit_code == 0
    assert "not found out: OSError: not on this machine" in result.output


def test_env_and_documentation_name_every_variable() -> None:
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    variables = set(re.findall(r'"(FLASHTILE_[A-Z_]+)"', code))
    assert variables == set(run_json("env")["variables"])
    assert variables == set(re.findall(r"`(FLASHTILE_[A-Z_]+)`", (ROOT / "ENVIRONMENT.md").read_text()))


def test_explain() -> None:
    shapes = "--batch 2 --heads 6 --heads-kv 2 --seqlen-q 64 --seqlen-k 96 --head-dim 32 --head-dim-v 16"
    features = "--causal --window 7, --softcap 30 --bias --alibi --sinks --dropout 0.1 --deterministic"
    found = run_json("explain", *f"{shapes} {features} --dtype bfloat16 --backend tiled".split())
    assert found["backend"] == "tiled"
    words = ("bfloat16", "heads 6/2", "64 x 96", "head_dim 32/16", "window (7, 0)")
    words += ("softcap", "bias", "alibi", "sinks", "dropout", "deterministic")
    assert all(word in found["problem"] for word in words)
    assert "backend cpu" in run("explain", "--seqlen-q", "64").output


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(user_files.CACHE_VARIABLE, str(tmp_path / "cache"))
    assert run_json("cache")["entries"] == 0
    for age, (kind, size) in enumerate([("cpu", 3_000_000), ("cpu", 1_000_000), ("self-checks", 500)]):
        path = user_files.write(bytes(size), kind, f"{age}")
        os.utime(path, (age, age))
    found = run_json("cache")
    assert (found["path"], found["bytes"]) == (str(tmp_path / "cache"), 4_000_500)
    assert found["kinds"] == {"cpu": {"entries": 2, "bytes": 4_000_000}, "self-checks": {"entries": 1, "bytes": 500}}
    text = run("cache").output
    assert f"{tmp_path}/cache: 3 files, 4.0 MB, of at most 1,000.0 MB\n  cpu            2 files, 4.0 MB\n" in text
    assert run_json("cache", "--limit", "1.5MB")["removed"] == {"entries": 1, "bytes": 3_000_000}
    assert "0 files, 0.0 MB" in run("cache", "--clear").output
    assert not user_files.entries()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cache", "--limit", "plenty"], "'plenty' is no size, such as 500MB"),
        (["cache", "--limit", "1MB", "--clear"], "not allowed with"),
        (["explain", "--heads", "6", "--heads-kv", "4"], "divides the 6 heads"),
        (["explain", "--backend", "none"], "'none'"),
        (["explain", "--kernels"], "--device cuda"),
        (["explain", "--window", "3"], "LEFT,RIGHT"),
        (["explain", "--device", "nowhere"], "does not work here"),
        (["verify", "--backend", "none"], "there is no such backend"),
        (["verify", "--record", f"{__file__}/x"], "cannot be written"),
        (["report", "--out", f"{__file__}/x"], "cannot be written"),
        (["bench", "--out", __file__], "cannot be written"),
        (["bench", "--reference", "nonsense"], "'nonsense' is not measured"),
        (
            ["bench", "--providers", "flashtile", "--reference", "plain"],
            "'plain' is not measured; providers: flashtile",
        ),
        (["bench", "--reference", "sdpa:cudnn"], "no such kernels for a CPU"),
        (["soak", "--backend", "none"], "there is no such backend"),
        (["ladder", "--table", "stack"], "pip install flashtile-ladder, then flashtile-ladder"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refusals_are_messages(words: list[str], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_verify() -> None:
    found = run_json(
        "verify", "--cases", "3", "--long", "0", "--seed", "7", "--dtype", "float32", "--dtype", "bfloat16"
    )
    assert found["passed"]
    assert not found["failures"]
    assert {tally["backend"] for tally in found["results"]} == {"cpu", "tiled", "reference"}
    assert {tally["dtype"] for tally in found["results"]} <= {"float32", "bfloat16"}
    assert sum(tally["cases"] for tally in found["results"] if tally["backend"] != "cpu") == 6
    assert "all within their bounds" in run("verify", "--cases", "1", "--long", "0").output


def test_verify_in_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashtile.verification.examine.SHARES_ELSEWHERE", (2, 1))
    several, one = (run_json("verify", "--cases", "4", "--long", "0", "--jobs", jobs) for jobs in ("2", "1"))
    assert several["results"] == one["results"]


@pytest.mark.usefixtures("broken_update")
def test_verify_finds_a_broken_backend() -> None:
    result = run("verify", "--cases", "2", "--long", "0", "--seed", "3", "--dtype", "float32")
    assert result.exit_code == 1
    assert "FAILED tiled: " in result.stdout
    assert "FAILED reference" not in result.stdout
    again = re.search(r"again: flashtile (.*)", result.stdout)
    assert again is not None
    description = re.search(r"FAILED tiled: (.*)", result.stdout)
    assert description is not None
    repeated = run(*shlex.split(again[1]), "--json")
    assert repeated.exit_code == 1
    failures = json.loads(repeated.stdout)["failures"]
    assert [(f["backend"], f["description"]) for f in failures] == [("tiled", description[1])]


def test_verify_counts_an_exception_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(entry, "forward", fails)
    result = run("verify", "--backend", "tiled", "--cases", "1", "--long", "0")
    assert result.exit_code == 1
    assert "RuntimeError: no kernel" in result.stdout
    assert "1 of 1 runs failed" in result.stdout


def test_verify_proves_nothing_where_everything_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    fast_path.forget()
    monkeypatch.setattr(support, "declines", lambda problem, device: "it is Sunday")
    result = run("verify", "--backend", "tiled", "--cases", "1", "--long", "0", "--json")
    fast_path.forget()
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert found["unverified"] == ["tiled"]
    assert found["declined"] == [{"backend": "tiled", "reason": "it is Sunday", "cases": 1}]


def test_verify_solves_nothing_that_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashtile.verification.examine.solve", lambda case: 1 / 0)
    words = ("--backend", "cpu", "--cases", "1", "--long", "0", "--seed", "115", "--dtype", "float32", "--json")
    found = json.loads(run("verify", *words).stdout)
    assert (found["failures"], found["declined"][0]["cases"]) == ([], 1)


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["flashtile", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("flashtile", run_name="__main__")
    assert capsys.readouterr().out.startswith("flashtile, version ")


def test_older_pythons_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thing that they import says so, in words that they can read."""
    package = ROOT / "src/flashtile"
    first = next(x for x in ast.parse((package / "__init__.py").read_text()).body if isinstance(x, ast.ImportFrom))
    assert (first.level, first.module, first.names[0].name) == (1, None, "supported")
    for name in ("__init__.py", "__main__.py", "supported.py"):
        ast.parse((package / name).read_text(), feature_version=(3, 7))
    monkeypatch.setattr(sys, "version_info", (3, 10, 12, "final", 0))
    with pytest.raises(ImportError, match=r"needs Python 3\.11 or newer; this is 3\.10"):
        runpy.run_path(str(package / "supported.py"))


@pytest.mark.parametrize(("version", "told"), [("2.9.1+cu128", "this is 2.9.1+cu128"), (None, "not installed")])
def test_older_pytorches_are_told(version: str | None, told: str, tmp_path: Path) -> None:
    """In one sentence, by the import and by the command, before anything that they lack is used."""
    code = "import sys; sys.modules['torch'] = None"  # as if it were not installed
    if version is not None:
        (tmp_path / "torch.py").write_text(f"__version__ = {version!r}")
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    code = f"{code}; sys.path.insert(0, {str(ROOT / 'src')!r}); import flashtile"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].startswith("ImportError: flashtile needs PyTorch 2.10 or newer")
    assert ended.stderr.rstrip().endswith(told)


def test_the_installed_command() -> None:
    command = Path(sys.executable).with_name("flashtile")
    result = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("flashtile, version ")
