"""Notebooks run from top to bottom. `ladder.ipynb` checks its claims: with a step broken, it fails. The chapters print
what is stored in them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtile_ladder import __main__, iomodel, step05_flash1, step06_flash2
from flashtile_ladder._host import cpp, triton_or_not

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import hosted
import run_notebooks

NOTEBOOK = Path(__file__).parents[1] / "examples" / "ladder.ipynb"


def cells() -> list[dict[str, Any]]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def run() -> dict[str, Any]:
    """Every cell of code in one namespace, as a kernel would; errors say which cell and line."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells()):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), namespace)
    return namespace


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    output = capsys.readouterr().out
    for words in ("naive [nan, nan, nan]", "backend cpu", "gradients agree to", "FlashAttention-1 on an A100"):
        assert words in output, output


BROKEN = {
    "the first order": (step05_flash1, "attention", lambda out, lse: (0.99 * out, lse)),
    "the second order": (step06_flash2, "attention", lambda out, lse: (out, lse + 0.01)),
    "its backward": (step06_flash2, "backward", lambda dq, dk, dv: (dq, 1.01 * dk, dv)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_it_sees_what_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, change = BROKEN[name]
    right = getattr(module, function)

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        results = right(*arguments, **keywords)
        for result, changed in zip(results, change(*(getattr(x, "x", x) for x in results)), strict=True):
            getattr(result, "x", result).copy_(changed)
        return results

    monkeypatch.setattr(module, function, wrong)
    with pytest.raises(AssertionError):
        run()


def test_it_sees_a_model_that_counts_less(monkeypatch: pytest.MonkeyPatch) -> None:
    right = iomodel.flash1_forward
    monkeypatch.setattr(iomodel, "flash1_forward", lambda *given: right(*given)._replace(read=1000))
    with pytest.raises(AssertionError, match="the model counts what the code does"):
        run()


def test_nothing_measured_elsewhere_is_kept_in_it() -> None:
    """Outputs are made by whoever runs it."""
    for cell in cells():
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert torch.get_default_dtype() is torch.float32


# The chapters --------------------------------------------------------------------------------------------------------


def test_a_chapter_prints_what_is_stored(tmp_path: Path) -> None:
    """And a stored output that is another is seen."""
    chapter = run_notebooks.FOLDER / "4_flash2.ipynb"
    text = chapter.read_text(encoding="utf-8")
    assert run_notebooks.differing(chapter) == []
    (tmp_path / chapter.name).write_text(text.replace("56% of them are visited", "57% of them are visited"))
    assert run_notebooks.differing(tmp_path / chapter.name) == [4]


@pytest.mark.course
@pytest.mark.skipif(cpp.compiler() is None, reason="there is no C++ compiler")
@pytest.mark.skipif(not triton_or_not.INSTALLED, reason="Triton is not installed")
def test_all_chapters_print_what_is_stored() -> None:
    """In a process of their own: the last one switches Triton's interpreter on."""
    environment = os.environ | {"PYTHONPATH": str(Path(__main__.__file__).parents[1])}
    command = [sys.executable, run_notebooks.__file__, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "6 notebooks: as stored\n"), done.stderr


def test_a_hosted_notebook_is_one_click_away() -> None:
    """Where the repository has an address; the stored notebooks and the page are as the setting says."""
    path = run_notebooks.CHAPTERS[0]
    stored = json.loads(path.read_text(encoding="utf-8"))
    bare = hosted.with_address(stored, path.name, "")
    for address, words in {
        "https://github.com/one/two": (
            "/github/one/two/blob/main/ladder/examples/1_softmax.ipynb",
            "/v2/gh/one/two/main",
        ),
        "https://example.org/two": ("/v2/git/https%3A%2F%2Fexample.org%2Ftwo/main?labpath=ladder%2Fexamples%2F1_",),
    }.items():
        found = hosted.with_address(stored, path.name, address)
        title, links, install, *rest = found["cells"]
        assert [title, *rest] == bare["cells"]
        assert all(word in links["source"][0] for word in words)
        assert ("Colab" in links["source"][0]) == ("github" in address)
        code = "".join(install["source"])
        assert f"git+{address}#subdirectory=ladder" in code
        exec(compile(code, "install", "exec"), {})  # nothing, where the course is installed
        assert hosted.with_address(found, path.name, address) == found
        assert hosted.with_address(found, path.name, "") == bare
    assert hosted.links("", path.name) == ""
    for chapter in run_notebooks.CHAPTERS:
        notebook = json.loads(chapter.read_text(encoding="utf-8"))
        assert notebook == hosted.with_address(notebook, chapter.name, hosted.repository())


@pytest.mark.parametrize("chapter", run_notebooks.CHAPTERS, ids=lambda path: path.stem)
def test_chapters_predict_run_and_explain(chapter: Path) -> None:
    """A question, a cell whose output has room for the answer, and the reason; links lead to files."""
    found = json.loads(chapter.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in found]
    questions = [i for i, text in enumerate(texts) if "**Predict.**" in text]
    assert len(questions) >= 3
    for i in questions:
        printed = "".join(line for output in found[i + 1]["outputs"] for line in output["text"])
        assert texts[i + 1].startswith("predicted = None\n")
        assert "predicted None\n" in printed
        assert texts[i + 2].startswith("**Explain.**")
    words = "".join(text for cell, text in zip(found, texts, strict=True) if cell["cell_type"] == "markdown")
    for link in re.findall(r"\]\(([^)#]+)", words):
        assert (chapter.parent / link).is_file(), link
    assert texts[-1].rpartition("**Next.**")[2]
