"""Exports to ONNX, run by ONNX Runtime; by command only, as CI does not install it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from flashtile.integrations.onnx import translations  # noqa: E402

B, HQ, HKV, SQ, SK, D = 2, 4, 2, 12, 20, 8


class Attention(torch.nn.Module):
    def __init__(self, scalars: dict[str, Any]) -> None:
        super().__init__()
        self.scalars = scalars

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **more: Tensor) -> Any:
        return flashtile.attention(q, k, v, **more, **self.scalars)


def inputs(rows: int, keys: int, dtype: torch.dtype = torch.float32, **more: Tensor) -> tuple[Any, ...]:
    shapes = (B, HQ, rows, D), (B, HKV, keys, D), (B, HKV, keys, D)
    return *(torch.randn(shape).to(dtype) for shape in shapes), more


def export(module: torch.nn.Module, given: tuple[Any, ...], **options: Any) -> Any:
    table = translations()
    options |= {"opset_version": 23, "custom_translation_table": table, "verbose": False}
    return torch.onnx.export(module.eval(), given[:-1], kwargs=given[-1], dynamo=True, **options)


def assert_same(program: Any, folder: Path, given: tuple[Any, ...], scalars: dict[str, Any]) -> None:
    program.save(folder / "model.onnx")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    flat = [*given[:-1], *given[-1].values()]
    found = session.run(None, {x.name: y.numpy() for x, y in zip(session.get_inputs(), flat, strict=True)})
    expected = Attention(scalars)(*given[:-1], **given[-1])
    expected = expected if isinstance(expected, tuple) else (expected,)
    for x, y in zip(found, expected, strict=True):
        tolerance = 2e-6 if y.dtype is torch.float32 else 2e-3
        torch.testing.assert_close(torch.from_numpy(x), y, rtol=tolerance, atol=tolerance)


def with_empty_row(x: Tensor, hidden: Any) -> Tensor:
    x[0, :, 2] = hidden
    return x


LSE = {"return_lse": True}
MASK, BIAS = torch.rand(B, 1, SQ, SK) > 0.5, torch.randn(1, HQ, SQ, SK)
CALLS: dict[str, tuple[dict[str, Any], tuple[Any, ...], bool]] = {  # scalars, inputs, whether Attention is alone
    "full": ({}, inputs(SQ, SK), True),
    "causal": ({"causal": True, "scale": 0.3, "softcap": 1.5}, inputs(SQ, SQ), True),
    "top left": ({"causal": "top_left"}, inputs(SQ, SK), True),
    "causal, more keys": ({"causal": True, **LSE}, inputs(SQ, SK), False),
    "causal, more rows": ({"causal": True, **LSE}, inputs(SK, SQ), False),
    "top left window": ({"causal": "top_left", "window": (7, None), **LSE}, inputs(SQ, SK), False),
    "window": ({"window": (3, 2), "softcap": 2.0, **LSE}, inputs(SQ, SK), False),
    "mask": ({"window": (None, 5), **LSE}, inputs(SQ, SK, mask=with_empty_row(MASK, False)), False),
    "mask of keys": (LSE, inputs(SQ, SK, mask=torch.rand(B, 1, 1, SK) > 0.3), False),
    "mask of rows": (LSE, inputs(SQ, SK, mask=torch.rand(B, 1, SQ, 1) > 0.3), False),
    "bias": ({"softcap": 2.0, **LSE}, inputs(SQ, SK, bias=with_empty_row(BIAS, float("-inf"))), False),
    "bias and mask": (LSE, inputs(SQ, SK, mask=MASK, bias=BIAS), False),
    "float16": ({"causal": True, **LSE}, inputs(SQ, SK, torch.float16), False),
    "float16 with a bias": (LSE, inputs(SQ, SK, torch.float16, bias=BIAS), False),
}


@pytest.mark.parametrize("name", CALLS)
def test_models_compute_the_same(name: str, tmp_path: Path) -> None:
    scalars, given, alone = CALLS[name]
    program = export(Attention(scalars), given)
    assert ([node.op_type for node in program.model.graph] == ["Attention"]) == alone
    assert_same(program, tmp_path, given, scalars)


@pytest.mark.parametrize("one_length", [True, False])
def test_dynamic_lengths(one_length: bool, tmp_path: Path) -> None:
    rows, keys = (torch.export.Dim(name, min=2, max=100) for name in ("rows", "keys"))
    keys = rows if one_length else keys
    scalars, shapes = {"causal": True}, {"q": {2: rows}, "k": {2: keys}, "v": {2: keys}}
    program = export(Attention(scalars), inputs(SQ, SQ if one_length else SK), dynamic_shapes=shapes)
    for lengths in ((SQ, SQ), (31, 31)) if one_length else ((SQ, SQ), (31, 40), (31, 7)):
        assert_same(program, tmp_path, inputs(*lengths), scalars)


@pytest.mark.parametrize(
    ("told", "scalars", "more"),
    [
        ("sinks", {}, {"sinks": torch.zeros(HQ)}),
        ("alibi_slopes", {}, {"alibi_slopes": torch.zeros(HQ)}),
        ("dropout_p", {"dropout_p": 0.1}, {}),
        ("attention_chunk", {"attention_chunk": 4}, {}),
        ("scale", {"scale": -1.0}, {}),
        ("score_mod", {"score_mod": flashtile.ScoreMod(lambda s, b, h, i, j: 2 * s)}, {}),
        ("mask_mod", {"mask": flashtile.MaskMod(lambda b, h, i, j: i >= j - 3 * h)}, {}),
    ],
)
def test_what_has_no_translation(told: str, scalars: dict[str, Any], more: dict[str, Any]) -> None:
    with pytest.raises(torch.onnx.OnnxExporterError, match=f"`{told}` is"):
        export(Attention(scalars), inputs(SQ, SK, **more))


def test_packed_sequences_have_no_translation() -> None:
    class Packed(torch.nn.Module):
        def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
            return flashtile.attention_varlen(x, x, x, offsets, offsets)

    given = torch.randn(9, HQ, D), torch.tensor([0, 4, 9], dtype=torch.int32)
    with pytest.raises(torch.onnx.OnnxExporterError, match=r"flashtile\.attention_varlen has no translation"):
        export(Packed(), (*given, {}))
