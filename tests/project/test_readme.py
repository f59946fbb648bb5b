"""The documentation keeps its promises: its code runs, its commands exist, its links lead somewhere."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commands import invoke
from torch import Tensor

import flashtile
from flashtile.backend.cpu.targets import WIDTHS
from flashtile.cli.env import VARIABLES

ROOT = Path(__file__).parents[2]
DOCUMENTS = [path for folder in ("docs", "ladder") for path in sorted((ROOT / folder).rglob("*.md"))]
DOCUMENTS[:0] = sorted(ROOT.glob("*.md"))


def blocks(language: str, document: str = "README.md") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)


def test_the_python_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    _, example = blocks("python")
    exec(compile(example, "README.md", "exec"), {})
    assert "torch.Size([2, 8, 300, 64])" in capsys.readouterr().out


def test_the_change_of_a_program_runs_as_it_stands() -> None:
    """Its imports exist, and the model then has flashtile's attention."""
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    change, _ = blocks("python")
    names: dict[str, Any] = {"model": mock.Mock()}
    exec(compile(change, "README.md", "exec"), names)
    names["model"].set_attn_implementation.assert_called_once_with("tile_attention")
    q = torch.randn(1, 2, 5, 8)
    out = names["flash_attn_func"](*(x.transpose(1, 2) for x in (q, q, q))).transpose(1, 2)
    torch.testing.assert_close(out, names["scaled_dot_product_attention"](q, q, q))


def test_the_decode_loop_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    """And its outputs are those of one call with all tokens, as the text below it says."""
    example, _ = blocks("python", "docs/kvcache.md")
    seen: dict[str, Any] = {}
    drawn: list[Tensor] = []
    randn = torch.randn

    def remembered(*shape: int) -> Tensor:
        drawn.append(randn(*shape))
        return drawn[-1]

    with mock.patch("torch.randn", remembered):
        exec(compile(example, "docs/kvcache.md", "exec"), seen)
    assert "torch.Size([2, 8, 120, 64])" in capsys.readouterr().out
    q, k, v = (torch.cat(drawn[n::3], dim=2) for n in range(3))
    caches = (torch.zeros_like(seen["k_cache"]) for _ in range(2))
    tables = {"rotary_cos": seen["angle"].cos(), "rotary_sin": seen["angle"].sin()}
    none = torch.zeros(2, dtype=torch.int32)
    whole = flashtile.attention_with_kvcache(q, *caches, cache_seqlens=none, k=k, v=v, causal=True, **tables)
    torch.testing.assert_close(torch.cat(seen["outs"], dim=2), whole)


def test_masks_at_other_positions_run_as_they_stand() -> None:
    """The example compares its own results."""
    _, example = blocks("python", "docs/kvcache.md")
    exec(compile(example, "docs/kvcache.md", "exec"), {"torch": torch, "flashtile": flashtile})


def test_commands_exist() -> None:
    text = "".join(document.read_text() for document in DOCUMENTS)
    for command in ("env", "explain", "verify", "soak", "bench", "report", "doctor", "calibrate"):
        assert f"flashtile {command}" in text
        assert invoke([command, "--help"]).exit_code == 0


def test_installation_blocks() -> None:
    """`.ci/run` takes the commands from here: the first block makes the report, the second tests. The third is the same
    for machines without a GPU, and names no address.
    """
    report, test, cpu = blocks("sh")
    assert "-c constraints-cpu.txt '.[report,test]' './ladder[test]'" in cpu
    pins = [(ROOT / file).read_text() for file in ("constraints.txt", "constraints-cpu.txt")]
    (pinned,) = re.findall(r"^torch==([\d.]+)$", pins[0], flags=re.MULTILINE)
    assert pins[1].splitlines()[1:] == ["-c constraints.txt", f"torch=={pinned}+cpu"]
    assert "://" not in cpu + pins[1]
    assert report.splitlines()[-1].endswith("flashtile report --quick")
    assert "pytest" in test.splitlines()[-1]
    for block in (report, test):
        assert "venv" in block.splitlines()[0]
        assert "-c constraints.txt" in block


def test_the_tests_that_tables_name_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "transforms.md").read_text()))
    assert len(named) > 5
    assert not [name for name in named if not list((ROOT / "tests").rglob(f"{name}.py"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document: Path) -> None:
    text = document.read_text()
    links = [*re.findall(r"\]\(([^)#]+)", text), *re.findall(r'<img src="([^"]+)"', text)]
    missing = [x for x in links if not x.startswith("https://") and not (document.parent / x).exists()]
    assert not missing


def test_the_environment_variables_are_those_of_the_code() -> None:
    """Every variable that begins with FLASHTILE has its row, and the row of the backend names all of them."""
    text = (ROOT / "ENVIRONMENT.md").read_text()
    assert set(re.findall(r"^\| `(FLASHTILE_\w+)`", text, flags=re.MULTILINE)) == set(VARIABLES)
    (row,) = re.findall(r"^\| `FLASHTILE_BACKEND`.*$", text, flags=re.MULTILINE)
    assert not [status.name for status in flashtile.backends() if f"`{status.name}`" not in row]
    (row,) = re.findall(r"^\| `FLASHTILE_CPU_VECTORS`.*$", text, flags=re.MULTILINE)
    assert not [width for width in WIDTHS if f"`{width}`" not in row]
