"""Build the sdist, the wheel from it, install that into a new environment, and use it: `python tests/packaged.py`.

Takes minutes: the environment gets PyTorch. `--constraints FILE` chooses its build, as in README.md.
"""

import email
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
NEEDED_IN_SDIST = (
    "README.md",
    "LICENSE",
    "SECURITY.md",
    "CHANGELOG.md",
    "hatch_build.py",
    "docs/index.md",
    "tests/packaged.py",
)
USE = """
import flashtile, torch, sys
assert sys.argv[1] in flashtile.__file__, flashtile.__file__
q = torch.randn(1, 2, 100, 64, requires_grad=True)
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
out = flashtile.attention(q, q, q, causal=True)
torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
print(torch.autograd.grad(out.sum(), q)[0].shape, flashtile.explain(q, q, q).backend)
"""


@click.command()
@click.option("--constraints", type=click.Path(exists=True), default=ROOT / "constraints.txt", show_default=True)
def main(constraints: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tools = environment(folder / "tools")
        run(tools, "-m", "pip", "install", "-q", "hatchling")
        run(tools, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder / "dist"), cwd=ROOT)
        (sdist,) = (folder / "dist").glob("*.tar.gz")
        checked_sdist(sdist)
        run(tools, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder / "dist"), str(sdist))
        (wheel,) = (folder / "dist").glob("*.whl")
        checked_wheel(wheel)
        clean = environment(folder / "clean")
        run(clean, "-m", "pip", "install", "-q", "-c", str(constraints), str(wheel))
        run(clean, "-c", USE, str(folder / "clean"), cwd=folder)
        run(clean, "-m", "flashtile", "--version", cwd=folder)
        click.echo(f"{sdist.name} ({sdist.stat().st_size:,} bytes) and {wheel.name} ({wheel.stat().st_size:,}) work")


def environment(place: Path) -> Path:
    run(Path(sys.executable), "-m", "venv", str(place))
    return place / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def run(python: Path, *arguments: str, cwd: Path | None = None) -> None:
    click.echo(f"python {' '.join(arguments[:6])}")
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, *arguments], cwd=cwd, check=True, env=elsewhere)


def checked_sdist(file: Path) -> None:
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in NEEDED_IN_SDIST if name not in names]
    assert not missing, missing
    assert not [name for name in names if "__pycache__" in name or name.startswith((".git/", ".venv/", ".ci/"))]


def checked_wheel(file: Path) -> None:
    """The wheel has every source file and nothing else, and its description has no relative link or image."""
    with zipfile.ZipFile(file) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    source = ROOT / "src"
    kept = {
        str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    }
    assert names == kept, names ^ kept
    description = email.message_from_string(text).get_payload()
    assert not re.findall(r"\]\((?!https?://|#)|src=\"(?!https?://)", str(description))


if __name__ == "__main__":
    main()
