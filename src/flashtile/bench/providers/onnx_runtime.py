"""ONNX Runtime on a CPU: the operator `MultiHeadAttention` of `com.microsoft`, as a model with one node."""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from ...testing.case import Case
from .provider import Declined, Prepared, Provider, require, softmax_scale

TAKES = {"causal", "bias", "Dv other than D"}
OPSET, IR = 17, 9


class OnnxRuntime(Provider):
    name = "onnx"

    def unusable(self, device: torch.device) -> str | None:
        missing = [name for name in ("onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
        if missing:
            return f"the package {' and '.join(missing)} is not installed"
        return None if device.type == "cpu" else "this provider calls ONNX Runtime's kernels for CPUs"

    def version(self) -> str:
        import onnxruntime  # pyright: ignore[reportMissingImports]

        return f"onnxruntime {onnxruntime.__version__}"

    def prepare(self, case: Case, decode: bool = False) -> Prepared:
        require(case, "MultiHeadAttention", TAKES)
        q, k, v = (case.arguments[name] for name in ("q", "k", "v"))
        if case.dtype is not torch.float32:
            raise Declined("MultiHeadAttention on a CPU takes float32")
        if case.differentiates:
            raise Declined("ONNX Runtime has no backward")
        if case.arguments.get("causal") and q.shape[2] != k.shape[2]:
            raise Declined("MultiHeadAttention is causal with as many keys as queries only")
        inputs = {name: tokens_first(x) for name, x in (("q", q), ("k", k), ("v", v))}
        if case.arguments.get("bias") is not None:
            inputs["bias"] = case.arguments["bias"]
        heads, causal = q.shape[1], bool(case.arguments.get("causal"))
        shapes = tuple((name, tuple(x.shape)) for name, x in inputs.items())
        session = new_session(heads, softmax_scale(case), causal, shapes, torch.get_num_threads())
        feeds = {name: x.detach().numpy() for name, x in inputs.items()}

        def forward() -> Tensor:
            (out,) = session.run(None, feeds)
            return torch.from_numpy(out).unflatten(2, (heads, -1)).transpose(1, 2)

        return Prepared(forward)


def tokens_first(x: Tensor) -> Tensor:
    """[B, H, S, D] -> [B, S, H * D]; a view where positions come before heads in memory."""
    return x.transpose(1, 2).flatten(2)


@functools.lru_cache(maxsize=1)
def new_session(
    heads: int, scale: float, causal: bool, shapes: tuple[tuple[str, tuple[int, ...]], ...], threads: int
) -> Any:
    """A session for the node with inputs of these shapes. Each has threads of its own, which spin after a call, so that
    the caches of decoding share one.
    """
    import onnxruntime  # pyright: ignore[reportMissingImports]
    from onnx import TensorProto, helper  # pyright: ignore[reportMissingImports]

    inputs = dict(shapes)
    names = ["q", "k", "v", *(["", "", "bias"] if "bias" in inputs else [])]  # key_value bias and padding between
    settings = {"num_heads": heads, "scale": scale, "unidirectional": int(causal)}
    node = helper.make_node("MultiHeadAttention", names, ["out"], domain="com.microsoft", **settings)
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)) for name, shape in inputs.items()]
    graph = helper.make_graph(
        [node], "attention", given, [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)]
    )
    operators = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=operators, ir_version=IR)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
