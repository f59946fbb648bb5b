"""`flashtile build-kernels`: archives of several architectures by one command, and a wheel that has them."""

import hashlib
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from commands import invoke

from flashtile.backend.gpu import archive
from flashtile.backend.gpu.archive import Archive, file_name
from flashtile.backend.gpu.replay import Launch
from flashtile.prebuilt import build, wheel
from flashtile.prebuilt.build import Compiled, key_of_launch
from flashtile.prebuilt.standard import StandardCall, empty


def compiled(launch: Launch, arch: str) -> Compiled:
    """As if compiled: its machine code is its name."""
    image = f"{launch.kernel.title} for {arch}".encode()
    facts = {"cubin": hashlib.sha256(image).hexdigest()}
    parameters = build.parameters_of(launch.kernel.function())
    return Compiled(launch.kernel.title, parameters, key_of_launch(launch), facts, image)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standard set of one call, and no compiler."""
    q = empty(1, 2, 512, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(build, "calls", lambda _: iter([StandardCall("attention", {"q": q, "k": q, "v": q}, True)]))
    monkeypatch.setattr(build, "compile_launch", compiled)
    monkeypatch.setattr(build, "triton_version", lambda: build.PINNED)


def test_several_architectures(tmp_path: Path) -> None:
    """Each has its file and its line, and another run gives the same bytes, by any number of processes."""
    result = invoke(("build-kernels", "--arch", "all", "--out", str(tmp_path / "one")))
    assert result.exit_code == 0, result.output
    *lines, total = result.stdout.splitlines()
    assert len(lines) == len(build.ARCHITECTURES) == 5
    for line, arch in zip(lines, build.ARCHITECTURES, strict=True):
        assert re.fullmatch(rf".*kernels-{arch}.zip: \d+ kernels for {arch}, \d\.\d MB, \d+ s", line), line
    assert re.fullmatch(r"\d+ kernels for 5 architectures, \d+ s", total)
    words = ("build-kernels", "--arch", "sm_90", "--arch", "sm_86", "--out", str(tmp_path / "two"), "--jobs", "2")
    (tmp_path / "two").mkdir()
    assert invoke(words).exit_code == 0
    for name in map(file_name, ("sm_90", "sm_86")):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert len(Archive(tmp_path / "two" / file_name("sm_90"), "sm_90", Driver)) >= 3
    assert invoke((*words[:-4], "--out", str(tmp_path / "one" / file_name("sm_90")))).exit_code == 2


class Driver:
    pass


def test_code_of_one_architecture_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(("build-kernels", "--arch", "sm_86", "--arch", "sm_80", "--out", str(tmp_path))).exit_code == 0
    with pytest.raises(ValueError, match="for sm_80, not for sm_89"):
        Archive(tmp_path / file_name("sm_80"), "sm_89", Driver)
    assert len(Archive(tmp_path / file_name("sm_86"), "sm_89", Driver)) > 0
    monkeypatch.setattr(archive, "PACKAGE", tmp_path)
    assert [archive.packaged(x).name for x in ("sm_80", "sm_86", "sm_89", "sm_100")] == [
        "kernels-sm_80.zip", "kernels-sm_86.zip", "kernels-sm_86.zip", "kernels-sm_100.zip",
    ]  # fmt: skip


def test_a_wheel_gets_all_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("flashtile/__init__.py", b"")
        file.writestr("x-1.dist-info/RECORD", "flashtile/__init__.py,,\nx-1.dist-info/RECORD,,\n")
    words: tuple[Any, ...] = ("build-kernels", "--arch", "sm_90", "--arch", "sm_86", "--out", str(tmp_path / "k"))
    assert invoke(words).exit_code == 0
    assert invoke((*words, "--wheel", str(path))).exit_code == 0
    with zipfile.ZipFile(path) as file:
        names, record = file.namelist(), file.read("x-1.dist-info/RECORD").decode()
    ahead = [f"flashtile/{file_name(x)}" for x in ("sm_90", "sm_86")]
    assert [x for x in names if x.endswith(".zip")] == ahead
    assert [line.split(",")[0] for line in record.splitlines()][-3:-1] == ahead
    monkeypatch.setattr(wheel, "LARGEST", path.stat().st_size - 10)
    before = path.read_bytes()
    result = invoke((*words, "--wheel", str(path)))
    assert (result.exit_code, path.read_bytes()) == (0, before)
    assert result.stdout.count("MB, more than") == 2
    file = str(tmp_path / "k" / file_name("sm_90"))
    result = invoke(("build-kernels", "--out", file, "--wheel", str(path)))
    assert (result.exit_code, path.read_bytes()) == (1, before)
