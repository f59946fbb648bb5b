"""The documentation keeps its promises: its code runs, its commands exist, its links lead somewhere."""

import importlib
import re
from collections.abc import Callable
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


def test_the_python_examples_run_as_they_stand(capsys: pytest.CaptureFixture[str]) -> None:
    """The first has six lines; the second, which counts calls, goes on with its names."""
    first, second = blocks("python")
    assert sum(map(bool, first.splitlines())) == 6
    names: dict[str, Any] = {}
    exec(compile(first, "README.md", "exec"), names)
    assert "torch.Size([2, 8, 300, 64]) torch.Size([1, 8, 300, 300])" in capsys.readouterr().out
    exec(compile(second, "README.md", "exec"), names)
    assert names["counts"].total == 1
    assert "1 x attention, forward" in capsys.readouterr().out


def test_the_readme_is_short_and_names_losses_before_speeds() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 100
    losses = text.index("**Where it loses**")
    assert losses < text.index("<!-- table: which_chip -->") < text.index("<img ")
    for chip in ("A100", "RTX 4090", "B200", "H100, H200", "MI300", "Mac", "Windows"):
        assert f"\n| {chip} | " in text


def switches() -> dict[str, tuple[str, str]]:
    """The line and the way back of each kind of program, from README's table."""
    found = re.findall(r"^\| (.*) \| `(.*)` \| `(.*)` \|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    return {kind: (line, back) for kind, line, back in found}


def attended(call: Callable[[], Tensor]) -> tuple[int, Tensor]:
    with flashtile.calls() as counts:
        out = call()
    return counts.total, out


def test_a_model_of_transformers_switches_by_the_line_and_goes_back() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra `transformers`")
    line, back = switches()["a model of transformers"]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 10}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2)).eval()
    tokens = torch.arange(6)[None]
    names = {"model": model, "flashtile": flashtile}
    before = model(tokens).logits
    exec(line, names)
    assert all(row.runs for row in flashtile.integrations.transformers.check(model))
    total, out = attended(lambda: model(tokens).logits)
    assert total == 2
    torch.testing.assert_close(out, before)
    exec(back, names)
    assert attended(lambda: model(tokens).logits)[0] == 0


def test_other_programs_switch_by_the_line_and_go_back() -> None:
    assert len(switches()) == 3
    q = torch.randn(1, 2, 40, 16)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = sdpa(q, q, q)

    def of_flash_attn() -> Tensor:
        x = q.transpose(1, 2)
        return importlib.import_module("flash_attn").flash_attn_func(x, x, x).transpose(1, 2)

    for kind, call in {"`import flash_attn`": of_flash_attn, "PyTorch's attention": lambda: sdpa(q, q, q)}.items():
        line, back = switches()[kind]
        exec(line, {"flashtile": flashtile})
        try:
            total, out = attended(call)
        finally:
            exec(back, {"flashtile": flashtile})
        assert total == 1
        torch.testing.assert_close(out, expected)
    assert attended(lambda: sdpa(q, q, q))[0] == 0
    with pytest.raises(ImportError):
        of_flash_attn()


def test_the_decode_loop_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    """And its outputs are those of one call with all tokens, as the text below it says."""
    example, *_ = blocks("python", "docs/kvcache.md")
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
    """And caches of 8 bits. The examples compare their own results."""
    _, *examples = blocks("python", "docs/kvcache.md")
    for example in examples:
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
