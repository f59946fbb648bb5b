"""The user's cache: files that someone else could have written do not count, and without a cache all works."""

import errno
import json
import os
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from flashtile.backend import user_files
from flashtile.backend.cpu import jit
from flashtile.backend.user_files import CACHE_VARIABLE
from flashtile.dispatch import self_check
from flashtile.errors import AttentionWarning
from flashtile.processes import run_python

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    user_files.warn_once.cache_clear()
    return tmp_path / "cache"


def test_nobody_else_may_write(cache: Path) -> None:
    before = os.umask(0)
    try:
        path = user_files.write(b"content", "cpu", "a.o")
    finally:
        os.umask(before)
    for place in (path, path.parent, cache):
        assert place.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) == 0
    assert user_files.read("cpu", "a.o") == b"content"


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("place", ["cpu/a.o", "cpu", "."])
def test_what_others_may_write_is_not_read(place: str, mode: int, cache: Path) -> None:
    user_files.write(b"content", "cpu", "a.o")
    (cache / place).chmod((cache / place).stat().st_mode | mode)
    with pytest.warns(AttentionWarning, match="chmod go-w"), pytest.raises(FileNotFoundError):
        user_files.read("cpu", "a.o")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning
        with pytest.raises(FileNotFoundError):
            user_files.read("cpu", "a.o")
        if place != "cpu/a.o":
            with pytest.raises(FileNotFoundError):
                user_files.write(b"content", "cpu", "b.o")


def test_files_of_another_user(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_files.write(b"content", "cpu", "a.o")
    owner = cache.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner != 0:
        with pytest.warns(AttentionWarning, match=f"belongs to user {owner}"), pytest.raises(FileNotFoundError):
            user_files.read("cpu", "a.o")
    else:  # root may change what every user runs
        assert user_files.read("cpu", "a.o") == b"content"
    status = os.stat_result((stat.S_IFREG | 0o600, 0, 0, 1, owner + 2, 0, 0, 0, 0, 0))
    with pytest.warns(AttentionWarning, match="belongs to user"), pytest.raises(FileNotFoundError):
        user_files.check_owner(cache, status)


def test_what_was_not_used_for_longest_goes_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_files, "LIMIT", 260)
    for age, name in enumerate("dcba"):
        path = user_files.write(bytes(80), "cpu" if name < "c" else "self-checks", name)
        used = time.time() - 10 * user_files.USE_IS_NOTED * (4 - age)
        os.utime(path, (used, used))
    assert [x.path.name for x in user_files.entries()] == ["c", "b", "a"]  # 240 bytes
    assert user_files.read("self-checks", "c") == bytes(80)
    user_files.write(bytes(80), "cpu", "e")
    assert [x.path.name for x in user_files.entries()] == ["a", "c", "e"]
    assert [x.path.name for x in user_files.trim(100)] == ["a", "c"]
    assert [(x.kind, x.size) for x in user_files.entries()] == [("cpu", 80)]


def test_files_are_listed_rarely(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of many files takes longer than to write one; the limit holds all the same."""
    monkeypatch.setattr(user_files, "LIMIT", 10_000)
    listed: list[int] = []
    entries = user_files.entries
    monkeypatch.setattr(user_files, "entries", lambda: listed.append(1) or entries())
    for n in range(60):
        user_files.write(bytes(10), "cpu", f"{n}.o")
    assert len(listed) == 1
    for n in range(4):
        user_files.write(bytes(2800), "cpu", f"large {n}.o")
        assert sum(x.size for x in entries()) <= 10_000
    assert sum(x.size for x in entries()) <= 9_375  # with room for the next ones


def test_a_folder_that_is_only_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a home on a file system that is mounted so: files count, nothing is written, and locks are for nobody."""
    path = user_files.write(b"content", "cpu", "a.o")
    os.utime(path, (0, 0))

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("open", "utime", "unlink"):
        monkeypatch.setattr(os, name, refused)
    assert user_files.read("cpu", "a.o") == b"content"
    with user_files.locked("cpu", "b.o"):
        assert [x.path.name for x in user_files.entries()] == ["a.o"]


@pytest.mark.skipif(not user_files.FILE_LOCKS, reason="no locks")
def test_locks(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process is not waited for forever, and a handler of a signal in this one not at all."""
    monkeypatch.setattr(user_files, "LONGEST_WAIT", 0.1)
    place = user_files.private_place("cpu", "a.o" + user_files.LOCK)
    with open(place, "w") as other:
        user_files.fcntl.flock(other, user_files.fcntl.LOCK_EX)
        begin = time.monotonic()
        with user_files.locked("cpu", "a.o"):
            assert 0.1 < time.monotonic() - begin < 5
    begin = time.monotonic()
    with user_files.locked("cpu", "a.o"), user_files.locked("cpu", "a.o"):
        assert time.monotonic() - begin < 0.1
        assert place.exists()
    assert not list(place.parent.iterdir())


@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_nothing_is_removed_where_others_may_write(mode: int, cache: Path) -> None:
    path = user_files.write(b"content", "cpu", "a.o")
    cache.chmod(0o700 | mode)
    with pytest.warns(AttentionWarning, match="chmod go-w"), pytest.raises(OSError, match="others may write"):
        user_files.trim(0)
    assert path.exists()


def test_machine_code_that_others_may_write_is_compiled(cache: Path) -> None:
    jit.write_object("a.o", b"code")
    assert jit.read_object("a.o") == b"code"
    (cache / "cpu" / "a.o").chmod(0o666)
    with pytest.warns(AttentionWarning, match="others may write it"):
        assert jit.read_object("a.o") is None


@pytest.mark.parametrize(
    "environment", [{CACHE_VARIABLE: "relative"}, {"XDG_CACHE_HOME": "relative", "HOME": "~"}, {"HOME": "here"}]
)
def test_no_path_depends_on_the_working_directory(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    user_files.warn_once.cache_clear()
    with pytest.warns(AttentionWarning, match="not used as a cache: a path that is not absolute"):
        jit.write_object("a.o", b"code")
    assert jit.read_object("a.o") is None
    assert self_check.recorded("key") == (False, None)
    assert not list(tmp_path.iterdir())


def test_a_relative_xdg_cache_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_files.directory() == tmp_path / ".cache" / "flashtile"


def test_a_calls_results_need_no_cache(tmp_path: Path) -> None:
    code = (
        "import torch, flashtile; q = torch.ones(1, 1, 4, 8)\n"
        "for n in (1, 2, 3): assert (flashtile.attention(q, q, q) == 1).all()"
    )
    environment = os.environ | {CACHE_VARIABLE: "relative"}
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("AttentionWarning") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["[" * 100_000, '{"final": true, "failure": ' + "[" * 100_000])
def test_deeply_nested_files(content: str, cache: Path) -> None:
    user_files.write(content.encode(), self_check.FOLDER, "key.json")
    assert self_check.recorded("key") == (False, None)


def test_helper_processes_import_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["", *map(os.path.abspath, filter(None, sys.path))])
    monkeypatch.chdir(tmp_path)
    for name in ("flashtile", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    seen: dict[str, str] = {}
    monkeypatch.setattr(self_check, "run_python", lambda *_, env, timeout: seen.update(env) or 1 / 0)
    assert not self_check.answer("triton", {})[0]
    ended = run_python("import json, sys; print(json.dumps(sys.path))", env=seen, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert not {"", str(tmp_path)} & {*json.loads(ended.stdout)}
