"""The notebook of the ladder runs from top to bottom, and its claims are checked: with a step broken, it fails."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtile_ladder import iomodel, step05_flash1, step06_flash2

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
