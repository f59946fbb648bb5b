"""The documentation keeps its promises: its code runs, its commands exist, its links lead somewhere."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashtile.cli import main

ROOT = Path(__file__).parents[1]
DOCUMENTS = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)


def test_the_python_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {})
    assert "torch.Size([2, 8, 300, 64])" in capsys.readouterr().out


def test_commands_exist() -> None:
    text = "".join(document.read_text() for document in DOCUMENTS)
    for command in ("env", "explain", "ladder", "verify"):
        assert f"flashtile {command}" in text
        assert CliRunner().invoke(main, [command, "--help"]).exit_code == 0


def test_installation_blocks() -> None:
    """`.ci/run` takes the commands from here: the first block verifies, the second tests."""
    verify, test = blocks("sh")
    assert verify.splitlines()[-1].endswith("flashtile verify")
    assert "pytest" in test.splitlines()[-1]
    for block in (verify, test):
        assert "venv" in block.splitlines()[0]
        assert "-c constraints.txt" in block


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", document.read_text())
    missing = [x for x in links if not x.startswith("https://") and not (document.parent / x).exists()]
    assert not missing
