"""The peers' test files: where they are, what of them runs here, and what is known to differ."""

import ast
import sys
import types
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flashtile.compat import install

from . import stand_ins

HOPPER = (9, 0)  # what tests on a CPU are told, so that they draw what they draw for the newest kernels
REPETITIONS = "thousands of repetitions of one call"
INTERNAL = "a test of the original's internals"
LIMIT = "a test of a limit that the original has and flashtile has not"
ERRORS = "a test of an error's type and words: flashtile raises its own, and on a GPU reads no lengths"
NO_FP8 = "fp8 inputs are declined"
NO_QV = "`qv` is declined"
ONE_KEY = "gradients of rows that see one key are 0 up to rounding, below 1e-4; the test wants exact zeros"
ROUNDING = 1e-4  # of these gradients
SINK = "gradients of sinks follow from `out`, whose rounding is up to twice the test's tolerance in sums that cancel"
SAMPLE = "the dropped part of a sample, within four standard deviations of dropout_p"


@dataclass(frozen=True)
class Suite:
    """The test file of one interface, and the tests of it that are not drawn, with the reason."""

    file: str
    helpers: str  # the folder of the checkout that its imports are in
    left_out: dict[str, str]


def difference(case: dict[str, Any], reason: str, local: dict[str, Any]) -> str | None:
    """The known difference that a case which has not passed for this reason shows, or `None`. `local` are the test's
    variables where it ended.
    """
    if any(str(x).startswith("torch.float8") for x in case.values()):
        return NO_FP8
    if case.get("has_qv") or "`qv`" in reason:
        return NO_QV
    if case.get("seqlen_k") == 1 and ("assert (dq - " in reason or "assert (dk - " in reason):
        gradients = (local["dq"], local["dk"], local["dq_ref"], local["dk_ref"])
        return ONE_KEY if all(float(x.abs().max()) < ROUNDING for x in gradients) else None
    if "dSink: " in reason and bool((local["diff"] < 2 * local["tolerance"]).all()):
        return SINK
    if "assert abs(dropout_fraction - dropout_p)" in reason:
        p, kept = local["dropout_p"], int((local["attn_ref"] != 0).sum())
        return SAMPLE if abs(local["dropout_fraction"] - p) < 4 * (p * (1 - p) / max(kept, 1)) ** 0.5 else None
    return None


LEFT_OUT_4 = {
    "test_flash_attn_bwd_preallocated_outputs": INTERNAL,
    "test_flash_attn_varlen_cumsum_metadata_paths": INTERNAL,
    "test_flash_attn_varlen_seqlen_k_per_split": INTERNAL,
    "test_flash_attn_ex2_emu_decode_prefill_consistency": INTERNAL,
    "test_flash_attn_invalid_head_dim": LIMIT,
    "test_flash_attn_mla_absorbed": NO_QV,
    "test_flash_attn_mla_absorbed_varlen": NO_QV,
    "test_flash_attn_mla_paged": NO_QV,
    "test_flash_attn_mla_sparse_bwd_sentinel": NO_QV,
    "test_flash_attn_mla_sparse_bwd_sentinel_varlen": NO_QV,
    "test_flash_attn_fp8_paged_decode_tile_boundary": NO_FP8,
    "test_flash_attn_fp8_paged_decode_preserves_tail_mass": NO_FP8,
}
SUITES = {
    "fa2": Suite(
        "tests/test_flash_attn.py",
        "tests",
        {
            "test_flash_attn_race_condition": REPETITIONS,
            "test_flash_attn_generator_arg_must_be_none": INTERNAL,
            "test_flash_attn_varlen_paged_kv_num_splits": LIMIT,
            "test_flash_attn_kvcache_paged_block_table_bounds": ERRORS,
        },
    ),
    "fa3": Suite(
        "hopper/test_flash_attn.py",
        "hopper",
        {
            "test_flash_attn_race_condition": REPETITIONS,
            "test_flash_attn_cluster": REPETITIONS,
            "test_flash3_bw_compatibility": INTERNAL,
            "test_flash_attn_varlen_combine_linearize": INTERNAL,
        },
    ),
    "fa4": Suite("tests/cute/test_flash_attn.py", "tests/cute", LEFT_OUT_4),
}


class MissingError(Exception):
    """A test has used a name that the facade does not have."""


class Missing:
    """A name of the original that the facade does not have: false, and an error where a test uses it."""

    def __init__(self, name: str):
        self.name = name

    def __bool__(self) -> bool:
        return False

    def __call__(self, *_: Any, **__: Any) -> None:
        raise MissingError(f"{self.name} does not exist")


def load(suite: Suite, source: Path, device: str) -> ModuleType:
    """Import a suite's test file from a checkout `source`, on a device, with the names that `install` gives it."""
    sys.modules["pytest"], sys.modules["einops"] = stand_ins.pytest(), stand_ins.einops()
    install(flash_attn_3=True, flash_attn_4=True)
    import_module("flash_attn_interface")  # before the folder that has the original's
    sys.path.insert(0, str(source / suite.helpers))
    if device == "cpu":
        pretend_to_have_a_gpu()
    path = source / suite.file
    text = path.read_text()
    add_missing_names(text, source, device)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    exec(compile(on_device(text, device), str(path), "exec"), vars(module))
    if hasattr(
        module, "normalize_flash_attn_S"
    ):  # it undoes the scale of the original's tiles, which S_dmask lacks here
        vars(module)["normalize_flash_attn_S"] = lambda weights, *_, **__: weights
    return module


def on_device(text: str, device: str) -> str:
    return text.replace('"cuda"', f'"{device}"') if device == "cpu" else text


def pretend_to_have_a_gpu() -> None:
    torch.cuda.get_device_capability = lambda *_: HOPPER
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=2**40, multi_processor_count=132)
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None


def add_missing_names(text: str, source: Path, device: str) -> None:
    """Make what a test file imports from `flash_attn` and the facade lacks: helpers of the checkout, and `Missing`."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("flash_attn"):
            continue
        module = module_of(node.module or "", source, device)
        for alias in node.names:
            if not hasattr(module, alias.name):
                setattr(module, alias.name, Missing(alias.name))


def module_of(name: str, source: Path, device: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        module = sys.modules[name] = ModuleType(name)
        helper = source / f"{name.replace('.', '/')}.py"
        if helper.stem == "testing":
            exec(compile(on_device(helper.read_text(), device), str(helper), "exec"), vars(module))
        return module
