"""Archives: what they have is launched without Triton, and one that does not fit is ignored with one warning."""

import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from fake_driver import FakeDriver, opened
from forced import in_order

from flashtile.backend import archive as archives
from flashtile.backend.gpu import archive, cost, launch, triton_launch
from flashtile.backend.gpu.archive import KERNELS_VARIABLE, SOURCES, Archive
from flashtile.backend.gpu.kernel import Kernel
from flashtile.backend.gpu.pointers import Slot
from flashtile.backend.hopper.plan import candidates
from flashtile.errors import AttentionWarning
from flashtile.prebuilt import build
from flashtile.prebuilt.build import Compiled, key_of_launch, parameters_of
from flashtile.prebuilt.launches import device_of, launches
from flashtile.prebuilt.standard import StandardCall

DEVICE = torch.device("cuda", 0)
PREPROCESS = Kernel("flashtile.backend.hopper.kernels.preprocess", "preprocess_kernel")


def compiled(launch: Any) -> Compiled:
    """The entry of a launch, as if compiled: its machine code is its title."""
    function, image = launch.kernel.function(), launch.kernel.title.encode()
    arguments = {**launch.scalars, **launch.pointers}
    metadata = mock.Mock(
        tensordesc_meta=[
            {"swizzle": 3, "elem_type": 9, "elem_size": 2, "block_size": list(x.block_shape), "fp4_padded": False}
            for name, _ in parameters_of(function) if hasattr(x := arguments[name], "block_shape")
        ],
        global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
        num_warps=12, num_ctas=1, shared=1000, launch_pdl=False, launch_cooperative_grid=False,
    )  # fmt: skip
    metadata.name = launch.kernel.name
    source, _, _ = build.source_of(launch, "sm_90")
    facts = build.facts_of(metadata, source.signature, image)
    return Compiled(launch.kernel.title, parameters_of(function), key_of_launch(launch), facts, image)


def call(dtype: torch.dtype = torch.bfloat16, backward: bool = True) -> StandardCall:
    """A call on CPU tensors, which the fake driver launches."""
    q, k, v = (torch.randn(1, 2, 200, 64).to(dtype) for _ in range(3))
    return StandardCall("attention", {"q": q, "k": k, "v": v, "causal": True}, backward)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An archive with the kernels of `call`."""
    file = tmp_path / "kernels.zip"
    build.write(file, "sm_90", "3.6.0", [compiled(x) for x in launches(call(), device_of("sm_90"))])
    return file


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """No archive is open, and calls are planned as with one."""
    archive.forget()
    pinned = mock.patch.object(candidates, "compiler_version", return_value=build.PINNED)
    with pinned, mock.patch.object(cost, "ranked", in_order):
        yield
    archive.forget()


def run(path: Path, driver: FakeDriver) -> dict[str, int]:
    """Run a forward pass twice, the second time recorded, then replay it; results by Triton are counted."""
    from flashtile.backend.hopper import entry
    from flashtile.call.problem import Problem
    from flashtile.prebuilt.launches import call_of, plan_of

    given = call()
    described = call_of(given)
    described = described._replace(tensors=described.tensors._replace(**{n: given.arguments[n] for n in "qkv"}))
    plan = plan_of(Problem.describe(described), device_of("sm_90"), None)
    known = Archive(path, "sm_90", lambda: driver)
    by_triton = {"launch": 0, "replayable": 0}

    def count(name: str) -> Callable[..., Any]:
        def counted(*_: Any) -> Any:
            by_triton[name] += 1
            return lambda tensors: None

        return counted

    with (
        opened(lambda: archive._archives["sm_90"]),
        mock.patch.multiple(triton_launch, launch=count("launch"), replayable=count("replayable")),
    ):
        archive._archives["sm_90"] = known
        entry.forward(plan, described)
        replay, _ = entry.record_forward(plan, described)
        replay(described)
    return by_triton


def test_an_archive_s_kernels_are_launched_and_replayed(path: Path) -> None:
    driver = FakeDriver()
    assert run(path, driver) == {"launch": 0, "replayable": 0}
    assert [name for _, name, *_ in driver.loaded] == ["forward_kernel"]
    assert len(driver.launched) == 3
    image = driver.loaded[0][0]
    assert image == b"hopper.kernels.forward.forward:forward_kernel"
    assert driver.launched[0].config.shared == 1000
    assert list(driver.launched[0].config.block) == [384, 1, 1]


def test_code_that_the_driver_cannot_run_is_compiled_instead(path: Path) -> None:
    with pytest.warns(AttentionWarning, match="no binary for this GPU") as warned:
        assert run(path, FakeDriver(unrunnable=True)) == {"launch": 1, "replayable": 1}
    assert len(warned) == 1


def rewritten(path: Path, change: Callable[[str, bytes], bytes], comment: bytes | None = None) -> None:
    """Change the files of an archive."""
    with zipfile.ZipFile(path) as old:
        contents = {name: old.read(name) for name in old.namelist()}
        comment = old.comment if comment is None else comment
    with zipfile.ZipFile(path, "w") as new:
        for name, content in contents.items():
            new.writestr(name, change(name, content))
        new.comment = comment


def with_index(path: Path, **changes: Any) -> None:
    """Change the index of an archive, and its hash."""
    import hashlib

    with zipfile.ZipFile(path) as old:
        text = json.dumps(json.loads(old.read(archives.INDEX)) | changes).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    rewritten(path, lambda name, content: text if name == archives.INDEX else content, digest)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "not a zip file"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-200]), "zip"),
    "altered index": (
        lambda path: rewritten(path, lambda name, x: x.replace(b'"shared":1000', b'"shared":9999')),
        "index was altered",
    ),
    "other format": (lambda path: with_index(path, format=99), "format is 99"),
    "other architecture": (lambda path: with_index(path, arch="sm_80"), "for sm_80, not for sm_90"),
    "other sources": (lambda path: with_index(path, sources={}), "other sources"),
    "missing": (lambda path: path.unlink(), "No such file"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_an_archive_that_does_not_fit_is_ignored(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage, reason = DAMAGE[name]
    damage(path)
    monkeypatch.setenv(KERNELS_VARIABLE, str(path))
    with pytest.warns(AttentionWarning, match=reason) as warned:
        found = [archive.archive_for("sm_90") for _ in range(3)]
    assert found == [None] * 3
    assert len(warned) == 1


def corrupted(content: bytes, draw: random.Random) -> bytes:
    """A few bytes changed, most of them in the headers, or some left out."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        near_an_end = draw.choice((64, 400, len(changed)))
        place = draw.randrange(min(near_an_end, len(changed))) * draw.choice((1, -1))
        changed[place] = draw.choice((0, 255, changed[place] ^ 1 << draw.randrange(8)))
    if draw.random() < 0.2:
        start = draw.randrange(len(changed))
        del changed[start : start + draw.randrange(200)]
    return bytes(changed)


def test_whatever_is_damaged_is_an_error_that_callers_warn_about(path: Path) -> None:
    """Opened and read in full, an archive is as it was, or refused."""
    content, refused = path.read_bytes(), 0
    whole = Archive(path, "sm_90", FakeDriver)
    digests = [x["cubin"] for kernel in whole.index["kernels"].values() for x in kernel["binaries"].values()]
    images = [whole.image(digest) for digest in digests]
    for seed in range(400):
        path.write_bytes(corrupted(content, random.Random(seed)))
        try:
            found = Archive(path, "sm_90", FakeDriver)
            assert [found.image(digest) for digest in digests] == images
        except (OSError, ValueError):
            refused += 1
    assert 100 < refused < 400


def test_an_altered_kernel_is_compiled_instead(path: Path) -> None:
    rewritten(path, lambda name, x: x if name == archives.INDEX else x[:-1] + b"X")
    with pytest.warns(AttentionWarning, match="a kernel was altered") as warned:
        assert run(path, FakeDriver()) == {"launch": 1, "replayable": 1}
    assert len(warned) == 1


def test_without_an_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "PACKAGE", Path("/nowhere"))
    assert archive.archive_for("sm_90") is None


def test_none_is_no_archive(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "PACKAGE", path.parent)
    path.rename(path.parent / archives.file_name("sm_90"))
    with mock.patch.object(archive, "sources", return_value=archive.sources()), mock.patch.object(archive, "driver"):
        monkeypatch.setenv(KERNELS_VARIABLE, "none")
        assert archive.archive_for("sm_90") is None
        archive.forget()
        monkeypatch.delenv(KERNELS_VARIABLE)


def test_another_call_is_not_in_the_archive(path: Path) -> None:
    """By dtype, alignment, constants or options."""
    driver = FakeDriver()
    known = Archive(path, "sm_90", lambda: driver)  # type: ignore[arg-type, return-value]
    for x in launches(call(), device_of("sm_90")):
        assert known.key(x.kernel, x.scalars, x.pointers) is not None
        assert known.key(x.kernel, x.scalars | {"num_warps": 8}, x.pointers) is None
        name, pointer = next((n, p) for n, p in x.pointers.items() if isinstance(p, torch.Tensor))
        odd = torch.empty(9, dtype=pointer.dtype, device="meta")[1:]
        assert known.key(x.kernel, x.scalars, x.pointers | {name: odd}) is None
        assert known.key(x.kernel, x.scalars, x.pointers | {name: None}) is None
    for x in launches(call(torch.float16), device_of("sm_90")):
        assert known.key(x.kernel, x.scalars, x.pointers) is None


NO_TRITON = """
import sys, torch
from unittest import mock
sys.modules["triton"] = None  # an import is an error
from fake_driver import FakeDriver, opened
from forced import in_order
from flashtile.backend.gpu import cost
from flashtile.backend.gpu.archive import Archive
import flashtile.backend.hopper.support as support, flashtile.backend.gpu.archive as archive
from flashtile.prebuilt.launches import call_of, device_of, plan_of
from flashtile.prebuilt.standard import StandardCall
from flashtile.call.call import Needs
from flashtile.call.problem import Problem
from flashtile.dispatch.passes import entry_of
cost.ranked = in_order
driver = FakeDriver()
known = Archive(sys.argv[1], "sm_90", lambda: driver)
archive._archives["sm_90"] = known
for seqlen, heads, width in ((200, 2, 64), (1, 8, 68)):
    q = torch.randn(1, heads, seqlen, width).bfloat16()
    k, v = (torch.randn(1, 2, 200, width).bfloat16() for _ in range(2))
    call = call_of(StandardCall("attention", {"q": q, "k": k, "v": v, "causal": seqlen > 1}))
    call = call._replace(tensors=call.tensors._replace(q=q, k=k, v=v))
    problem, needs = Problem.describe(call), Needs(True, True, True)
    forward = plan_of(problem, device_of("sm_90"), None)
    backward = plan_of(problem, device_of("sm_90"), needs)
    with mock.patch.object(archive, "archive_of", lambda device: known):
        out, lse = entry_of(forward.backend).forward(forward, call)
        replay, _ = entry_of(forward.backend).record_forward(forward, call)
        replay(call)
        if seqlen > 1:
            entry_of(backward.backend).backward(backward, call, needs, out, lse, torch.ones_like(out), None)
print(len(driver.launched), *(name for _, name, *_ in driver.loaded))
"""


def test_planning_and_arguments_never_import_triton(path: Path) -> None:
    """In a process where importing it is an error: forward, backward, replay, and decoding of a width for which Hopper
    has no kernels.
    """
    decode = {
        name: torch.empty(1, n, rows, 68, dtype=torch.bfloat16)
        for name, n, rows in (("q", 8, 1), ("k", 2, 200), ("v", 2, 200))
    }
    ahead = [
        compiled(x)
        for given in (call(), StandardCall("attention", decode))
        for x in launches(given, device_of("sm_90"))
    ]
    build.write(path, "sm_90", "3.6.0", ahead)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", NO_TRITON, str(path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [
        "9",
        "forward_kernel",
        "preprocess_kernel",
        "backward_kernel",
        "postprocess_kernel",
        "forward_kernel",
    ]


def test_sources_are_all_that_kernels_import() -> None:
    """Else an archive might have kernels of other sources than the package."""
    from modules import MODULES
    from project.test_imports import imports_of

    def in_sources(module: str) -> bool:
        file = module.replace(".", "/")
        return any(file.startswith(x) or f"{file}.py" == x for paths in SOURCES.values() for x in paths)

    kernels = [name for name in MODULES if ".kernels" in name and name.startswith("backend.")]
    assert len(kernels) > 40
    for name in kernels:
        if name.startswith("backend.cpu"):
            continue
        for target in imports_of(name, at_import=False):
            assert in_sources(target), f"{name} imports {target}"


def test_launch_uses_the_archive_first() -> None:
    step = mock.Mock()
    with (
        mock.patch.object(launch, "of_archive", return_value=step),
        mock.patch.object(triton_launch, "launch") as other,
    ):
        launch.launch(PREPROCESS, 1, {}, {"x": Slot(0)}, [None])
    assert step.call_count == 1
    assert other.call_count == 0
