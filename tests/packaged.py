"""Build both packages as they are published, check them, install them into new environments, and use and test them:

    python tests/packaged.py

Takes minutes: the environment gets PyTorch. `--constraints FILE` chooses its build, as in README.md; `--url` is the
repository's address, as a release has it. With `--kernels FOLDER`, which `flashtile build-kernels` has
filled, there is another wheel with compiled kernels.
"""

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"flashtile": ROOT, "flashtile_ladder": ROOT / "ladder"}
NEEDED_IN_SDIST = {
    "flashtile": (
        "README.md", "LICENSE", "SECURITY.md", "CHANGELOG.md", "hatch_build.py", "docs/index.md", "tests/packaged.py",
    ),
    "flashtile_ladder": ("README.md", "LICENSE", "docs/ladder.md", "tests/test_ladder.py"),
}  # fmt: skip
TOOLS = ("hatchling", "twine", "check-wheel-contents")
USE = """
import flashtile, torch, sys
assert sys.argv[1] in flashtile.__file__, flashtile.__file__
q = torch.randn(1, 2, 100, 64, requires_grad=True)
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
out = flashtile.attention(q, q, q, causal=True)
torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
print(torch.autograd.grad(out.sum(), q)[0].shape, flashtile.explain(q, q, q).backend)
"""
READ = """
from flashtile.backend.archive import PACKAGE
from flashtile.backend.cpu.archive import of_this_version
from flashtile.backend.gpu.archive import Archive
for path in sorted(PACKAGE.glob("kernels-*.zip")):
    arch = path.stem.removeprefix("kernels-")
    if arch == "cpu":
        count = sum(map(len, of_this_version(path).index["kernels"].values()))
    else:
        count = len(Archive(path, arch, lambda: None))
    print(path.name, count, "kernels for", arch)
assert any(PACKAGE.glob("kernels-*.zip"))
"""
WITH_KERNELS = "with-kernels"  # the folder of the wheel that has them: its name is that of the other wheel
TESTS = ("tests/api/test_errors.py", "tests/api/test_gradients.py", "tests/cli/test_cli.py", "tests/cli/test_doctor.py")
TESTS += ("tests/report", "ladder/tests/test_ladder_package.py", "ladder/tests/test_ladder_alone.py")
TESTS += ("-k", "not test_older")  # which read the sources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--url", default="")
    parser.add_argument("--kernels", type=Path, help="a folder of archives")
    parser.add_argument("--out", type=Path, help="a folder that gets the sdists and wheels")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        dist = folder / "dist"
        tools = environment(folder / "tools")
        run(tools, "-m", "pip", "install", "-q", *TOOLS)
        wheels = {name: built(name, tools, folder, given.url) for name in PACKAGES}
        run(tools, "-m", "twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
        run(tools, "-m", "check_wheel_contents", *map(str, wheels.values()))
        clean = environment(folder / "clean")
        pip = "-m", "pip", "install", "-q", "-c", str(given.constraints)
        run(clean, *pip, str(wheels["flashtile"]))
        run(clean, "-m", "pip", "check")
        run(clean, "-c", USE, str(folder / "clean"), cwd=folder)
        for command in ("--version", "env", "doctor", "explain --seqlen-q 64", "verify --cases 3 --long 0"):
            run(clean, "-m", "flashtile", *command.split(), cwd=folder)
        if given.kernels is not None:
            wheel = with_kernels(clean, wheels["flashtile"], given.kernels)
            run(tools, "-m", "twine", "check", "--strict", str(wheel))
            run(tools, "-m", "check_wheel_contents", str(wheel))
            run(clean, *pip, "--force-reinstall", "--no-deps", str(wheel))
            run(clean, "-c", READ, cwd=folder)
            run(clean, "-c", USE, str(folder / "clean"), cwd=folder)
        tested = environment(folder / "tested")  # the course first, and the library for its tests
        run(tested, *pip, str(wheels["flashtile_ladder"]))
        run(tested, "-m", "flashtile_ladder.cli", "--table", "stack", cwd=folder)
        run(tested, *pip, f"{wheels['flashtile']}[test]", f"{wheels['flashtile_ladder']}[test]")
        run(tested, "-m", "pip", "check")
        run(tested, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "auto", *TESTS, cwd=without_sources(folder))
        for file in sorted(x for x in dist.rglob("*") if x.is_file()):
            print(f"{file.relative_to(dist)}: {file.stat().st_size:,} bytes")
        if given.out is not None:
            shutil.copytree(dist, given.out, dirs_exist_ok=True)


def environment(place: Path) -> Path:
    run(Path(sys.executable), "-m", "venv", str(place))
    return place / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def run(python: Path, *arguments: str, cwd: Path | None = None) -> None:
    print(f"python {' '.join(arguments[:6])}", flush=True)
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, *arguments], cwd=cwd, check=True, env=elsewhere)


def built(name: str, tools: Path, folder: Path, url: str) -> Path:
    """The checked wheel of a package, made from its checked sdist."""
    source, dist = folder / "sources" / name, folder / "dist"
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "dist", "build")
    shutil.copytree(PACKAGES[name], source, ignore=ignored)
    project = source / "pyproject.toml"
    project.write_text(project.read_text().replace('\nurl = ""\n', f'\nurl = "{url}"\n'))
    run(tools, "-m", "hatchling", "build", "-t", "sdist", "-d", str(dist), cwd=source)
    (sdist,) = dist.glob(f"{name}-*.tar.gz")
    checked_sdist(sdist, NEEDED_IN_SDIST[name])
    run(tools, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(dist), str(sdist))
    (wheel,) = dist.glob(f"{name}-*.whl")
    checked_wheel(wheel, PACKAGES[name] / "src")
    return wheel


def with_kernels(python: Path, wheel: Path, kernels: Path) -> Path:
    """A copy of the wheel with the archives that fit, in a folder of its own."""
    copy = wheel.parent / WITH_KERNELS / wheel.name
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(wheel, copy)
    for kinds, out in ((("--cpu",), kernels / "kernels-cpu.zip"), (("--arch", "all"), kernels)):
        words = *kinds, "--out", str(out.resolve()), "--wheel", str(copy)
        run(python, "-m", "flashtile", "build-kernels", *words, cwd=wheel.parent)
    return copy


def without_sources(folder: Path) -> Path:
    """A copy of the repository whose packages can only be imported as they are installed."""
    copy = folder / "copy"
    names = ".git", ".venv", "__pycache__"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*names))
    for place in PACKAGES.values():
        for package in (copy / place.relative_to(ROOT) / "src").iterdir():
            (package / "__init__.py").rename(package / "removed.txt")
    return copy


def checked_sdist(file: Path, needed: tuple[str, ...]) -> None:
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in needed if name not in names]
    assert not missing, missing
    assert not [name for name in names if "__pycache__" in name or name.startswith((".git/", ".venv/", ".ci/"))]


def checked_wheel(file: Path, source: Path) -> None:
    """The wheel has every source file and nothing else, and its description has no relative link or image."""
    with zipfile.ZipFile(file) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    kept = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == kept, names ^ kept
    description = email.message_from_string(text).get_payload()
    assert not re.findall(r"\]\((?!https?://|#)|src=\"(?!https?://)", str(description))


if __name__ == "__main__":
    main()
