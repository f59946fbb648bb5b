"""Every wrong call raises an AttentionError before a kernel runs: the argument, what it got, what works."""

import copy
import functools
import importlib
import pickle
import re
import types
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from modules import MODULES
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flashtile
from flashtile import ArgumentError, AttentionError, BackendError
from flashtile.errors import SignatureError, describe

layout_key = importlib.import_module("flashtile.call.memory").layout_key

Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
DENSE: dict[str, Any] = {"q": Q, "k": K, "v": V}


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


CU = ints(0, 3, 8)
VARLEN: dict[str, Any] = {
    "q": torch.randn(8, 4, 8),
    "k": torch.randn(8, 2, 8),
    "v": torch.randn(8, 2, 6),
    "cu_seqlens_q": CU,
    "cu_seqlens_k": CU,
}
PAGED: dict[str, Any] = VARLEN | {
    "k": torch.randn(5, 4, 2, 8),
    "v": torch.randn(5, 4, 2, 6),
    "cu_seqlens_k": None,
    "seqused_k": ints(5, 8),
    "page_table": ints([0, 1], [2, 3]),
}
CALLS = {
    "dense": functools.partial(flashtile.attention, **DENSE),
    "varlen": functools.partial(flashtile.attention_varlen, **VARLEN),
    "paged": functools.partial(flashtile.attention_varlen, **PAGED),
}


class Wrong(types.SimpleNamespace):
    """One argument (or more) of a call that works, replaced by something that does not."""

    call: str
    argument: str  # the one the error must name
    changes: dict[str, Any]


def wrong(argument: str, *values: Any, call: str = "dense", **others: Any) -> list[Wrong]:
    return [Wrong(call=call, argument=argument, changes={argument: value} | others) for value in values]


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(4, 8)], layout=layout)


# q, k, v: what is no tensor, wrong dimensions, dtypes, devices and layouts -----------------------------------------
TENSORS = [
    entry
    for name, x in DENSE.items()
    for entry in (
        *wrong(name, None, 1.0, "q", [1.0], np.zeros((2, 2, 7, 8), np.float32)),
        *wrong(name, x[0], x[None], torch.tensor(1.0), x[..., :0], x.flatten()),
        *wrong(name, x.int(), x.bool(), x.to(torch.complex64), x.to(torch.float8_e4m3fnuz)),
        *wrong(name, x.to_sparse(), x[0, 0].to_sparse_csr(), x.to_mkldnn()),
        *wrong(name, nested(torch.strided), nested(torch.jagged)),
    )
]
TENSORS += [
    *wrong("k", Q.half(), Q.double(), K[:1], K[..., :7], torch.randn(2, 3, 7, 8), torch.randn(2, 8, 7, 8), K[:, :0]),
    *wrong("v", K.half(), K[:1], K[:, :1], K[:, :, :6], torch.randn(2, 2, 7, 1025)),
    *wrong("q", Q[:, :0]),
    *wrong("q", torch.randn(2, 4, 5, 1025), k=torch.randn(2, 2, 7, 1025)),
    *wrong("k", K.to("meta")),
    *wrong("v", V.to("meta")),
    *wrong("k", K, q=Q.to("meta")),
]

# Settings ----------------------------------------------------------------------------------------------------------
SETTINGS = [
    *wrong("causal", None, 0, 1, "bottom_right", 2.0, torch.tensor(True), [True], np.bool_(True)),
    *wrong("window", 3, (1,), (1, 2, 3), (-(2**70), 0), (1.5, 0), ("a", 0), (True, 0), "ab", (float("inf"), 0)),
    *wrong("window", (np.float32(1), 0), (np.bool_(True), 0), (np.int64(-(2**63)), "0")),
    *wrong("window", torch.tensor([1, 2]), {1: 2, 3: 4}),
    *wrong("window", (2**63, 0), (0, 2**70)),
    *wrong("scale", float("nan"), float("inf"), -float("inf"), "a", torch.tensor(1.0), True, 1j, [1]),
    *wrong("scale", 10**400),
    *wrong("scale", 1e39, np.float32("inf"), np.float16("nan"), np.bool_(True), np.complex64(1)),
    *wrong("softcap", float("nan"), float("inf"), -1.0, "a", torch.tensor(1.0), True),
    *wrong("softcap", 1e39),
    *wrong("dropout_p", -0.1, 1.0, 1.5, float("nan"), "a", None, True, torch.tensor(0.5)),
    *wrong("dropout_seed", 1.5, "a", True, 2**64, -(2**63) - 1, np.bool_(True), torch.tensor(3.0), dropout_p=0.5),
    *wrong("dropout_seed", ints(3), torch.tensor([1, 2]), torch.zeros(0, dtype=torch.int64), dropout_p=0.5),
    *wrong("dropout_seed", torch.tensor([3], device="meta"), dropout_p=0.5),
    *wrong("deterministic", 1, 0, "yes", torch.tensor(True)),
    *wrong("backend", None, 3, b"tiled"),
]

# Tensors that modify scores ----------------------------------------------------------------------------------------
PAIRS = torch.randn(2, 4, 5, 7)
MODIFIERS = [
    entry
    for name, good in {
        "mask": PAIRS > 0,
        "bias": PAIRS,
        "alibi_slopes": PAIRS[0, :, 0, 0],
        "sinks": PAIRS[0, :, 0, 0],
    }.items()
    for entry in (
        *wrong(name, 1.0, "a", [[True]], np.zeros((2, 4, 5, 7))),
        *wrong(name, good[0], good[None, None], good.to(torch.complex64), good.to_sparse()),
        *wrong(name, good.to("meta")),
    )
]
MODIFIERS += [
    *wrong("mask", PAIRS, (PAIRS > 0).int(), (PAIRS > 0)[0], (PAIRS > 0)[:, :2], (PAIRS > 0)[..., :6]),
    *wrong("bias", PAIRS.int(), PAIRS > 0, PAIRS[0], PAIRS[:, :2], PAIRS[..., :6], PAIRS[..., :0]),
    *wrong(
        "alibi_slopes", torch.rand(4).long(), torch.rand(1, 4), torch.rand(2, 1), torch.rand(2, 4, 1), torch.rand(2)
    ),
    *wrong("sinks", torch.ones(4, dtype=torch.complex64), torch.rand(2, 4), torch.rand(1), torch.rand(5)),
]


class Noted(Tensor):
    """Data with a note: kernels read it as they read a tensor."""


class Described(Tensor):
    """A class that may answer for its elements by torch functions of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


MODIFIERS += [
    *wrong("bias", causal_upper_left(5, 7)[None], PAIRS.as_subclass(Described)),
    *wrong("mask", causal_lower_right(5, 7), (PAIRS > 0).as_subclass(Described)),
    *wrong("bias", torch.randn(2, 4, 5, 6).as_subclass(Described), call="varlen"),
]

# Lengths and pages -------------------------------------------------------------------------------------------------
varlen, paged = functools.partial(wrong, call="varlen"), functools.partial(wrong, call="paged")
LENGTHS = [
    entry
    for name in ("cu_seqlens_q", "cu_seqlens_k")
    for entry in (
        *varlen(name, None, [0, 3, 8], np.array([0, 3, 8]), CU.float(), CU.short(), CU[None], ints()),
        *varlen(name, ints(0, 3, 9), ints(0, 5, 3), ints(1, 3, 8), ints(0, -1, 8), ints(0, 2**31 - 1, 8)),
        *varlen(name, torch.tensor([0, 2**62, 8])),
        *varlen(name, CU.to("meta")),
    )
]
LENGTHS += [
    *varlen("cu_seqlens_k", ints(0, 8), ints(0, 3, 5, 8), ints(0)),
    *varlen("cu_seqlens_k", CU, cu_seqlens_q=ints(0, 8)),
    *varlen("q", Q, VARLEN["q"][0]),
    *varlen("k", K, PAGED["k"]),
    *varlen("max_seqlen_q", -1, 2.0, "a", True, torch.tensor(5), np.float64(5)),
    *varlen("max_seqlen_k", -1, 2.0, "a", True, torch.tensor(5), np.float64(5)),
    *varlen("max_seqlen_q", 2**64),
    *varlen("cu_seqlens_q", CU, max_seqlen_q=4),
    *varlen("cu_seqlens_k", CU, max_seqlen_k=4),
    *varlen("seqused_k", ints(4, 5), ints(-1, 5), ints(3), ints(3, 5, 1), ints(3, 5).float(), [3, 5], ints([3, 5])),
    *varlen("bias", torch.randn(2, 4, 8, 8), max_seqlen_q=5),
    *varlen("alibi_slopes", torch.rand(8, 4)),
    *paged("page_table", PAGED["page_table"].float(), ints(0, 1), ints([0, 1]), "a"),
    *paged("page_table", ints([0], [2]), max_seqlen_k=8),
    *paged("page_table", ints([0, 1], [2, 5]), ints([0, -1], [2, 3]), ints([0, 1], [2, 2**31 - 1])),
    *paged("seqused_k", ints(5, 9), ints(-1, 8), ints(5), ints(5, 8), max_seqlen_k=7),
    *paged("cu_seqlens_k", None, seqused_k=None),
    *varlen("cu_seqlens_k", None, seqused_k=ints(3, 5)),
    *paged("page_table", ints([0], [2])),
    *paged("cu_seqlens_k", ints(0, 5, 3), seqused_k=None),
    *paged("k", VARLEN["k"], torch.randn(5, 4, 3, 8)),
    *paged("k", torch.randn(5, 0, 2, 8), v=torch.randn(5, 0, 2, 6)),
    *paged("v", torch.randn(5, 3, 2, 6), torch.randn(4, 4, 2, 6)),
]


def as_parameter(entry: Wrong) -> Any:
    value = describe(entry.changes[entry.argument]).replace("\n", " ")
    return pytest.param(entry, id=f"{entry.call} {entry.argument} {value}")


@pytest.mark.parametrize("entry", [as_parameter(x) for x in (*TENSORS, *SETTINGS, *MODIFIERS, *LENGTHS)])
def test_wrong_argument(entry: Wrong) -> None:
    a_kernel_ran = AssertionError("a kernel ran")
    kernel = mock.patch("flashtile.backend.tiled.forward.forward_rows", side_effect=a_kernel_ran)
    with kernel, pytest.raises(AttentionError) as raised:
        CALLS[entry.call](**entry.changes)
    assert isinstance(raised.value, ArgumentError)
    assert raised.value.argument == entry.argument
    text = str(raised.value)
    assert text.startswith(f"`{entry.argument}` is {describe(entry.changes[entry.argument])}")
    assert "\n  accepted: " in text
    assert "\n  a call that works: flashtile.attention" in text


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_without_mistakes_work(call: str) -> None:
    assert CALLS[call]().isfinite().all()


@pytest.mark.parametrize("argument", ["window", "deterministic", "dropout_p", "k"])
def test_example_is_a_call_of_the_same_function(argument: str) -> None:
    """What works for `attention` would not help the caller of `attention_varlen`."""
    with pytest.raises(ArgumentError, match=r"a call that works: flashtile\.attention_varlen\("):
        CALLS["varlen"](**{argument: "wrong"})


# Errors travel between processes and are copied ----------------------------------------------------------------------


def classes_of_errors() -> list[type[BaseException]]:
    """Every exception and warning that the package defines."""
    modules = [
        name for name, path in MODULES.items() if re.search(r"^class \w+\(.*\):", path.read_text(), re.MULTILINE)
    ]
    loaded = [importlib.import_module(f"flashtile.{name}".rstrip(".")) for name in modules if "backends" not in name]
    return [
        found
        for module in loaded
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, BaseException) and found.__module__ == module.__name__
    ]


@pytest.mark.parametrize(
    "survive",
    [
        copy.copy,
        copy.deepcopy,
        *(functools.partial(lambda n, x: pickle.loads(pickle.dumps(x, n)), n) for n in range(6)),
    ],
    ids=["copy", "deepcopy", *(f"pickle {n}" for n in range(6))],
)
def test_errors_are_copied_and_pickled(survive: Any) -> None:
    """A worker of a process pool that raises one that cannot be read again leaves its caller waiting for ever."""
    given = {
        ArgumentError: (("window", Q, "None or (left, right)"), {"argument": "window"}),
        SignatureError: (("is_causal", True, "`causal`"), {"argument": "is_causal"}),
        BackendError: (("no backend", {"cpu": "too wide"}), {"reasons": {"cpu": "too wide"}}),
    }
    classes = classes_of_errors()
    assert len(classes) >= 10
    assert set(given) < set(classes)
    for cls in classes:
        arguments, attributes = given.get(cls, (("a message",), {}))
        error = cls(*arguments)
        error.add_note("at step 7")
        found = survive(error)
        assert type(found) is cls
        assert (str(found), found.args, found.__notes__) == (str(error), error.args, ["at step 7"])
        assert {name: getattr(found, name) for name in attributes} == attributes


# Memory that is gone -------------------------------------------------------------------------------------------------

KVCACHE: dict[str, Any] = {
    "q": Q,
    "k_cache": torch.randn(2, 2, 7, 8),
    "v_cache": torch.randn(2, 2, 7, 6),
    "cache_seqlens": ints(1, 2),
    "k": torch.randn(2, 2, 5, 8),
    "v": torch.randn(2, 2, 5, 6),
    "rotary_cos": torch.randn(7, 2),
    "rotary_sin": torch.randn(7, 2),
}
HELD: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": (flashtile.attention, DENSE | {"bias": PAIRS, "mask": PAIRS > 0, "sinks": PAIRS[0, :, 0, 0]}),
    "varlen": (flashtile.attention_varlen, VARLEN | {"seqused_k": ints(3, 4), "alibi_slopes": torch.rand(4)}),
    "paged": (flashtile.attention_varlen, PAGED),
    "kvcache": (flashtile.attention_with_kvcache, KVCACHE),
}


def behind(x: Tensor) -> Tensor:
    """A copy with an offset into its storage: freed, its address is that offset and not 0."""
    return torch.cat((torch.zeros(8, dtype=x.dtype), x.flatten()))[8:].view(x.shape)


def free(x: Tensor) -> None:
    x.untyped_storage().resize_(0)


@pytest.mark.parametrize("copied", [torch.clone, behind], ids=["at the beginning", "behind the beginning"])
@pytest.mark.parametrize("call", HELD)
def test_freed_memory_is_refused(call: str, copied: Any) -> None:
    """Also where the same call has worked before; it would end the process."""
    function, given = HELD[call]
    tensors = {name: x for name, x in given.items() if x is not None}
    for name in tensors:
        copies = {other: copied(x) for other, x in tensors.items()}
        for mod in (None, flashtile.ScoreMod(lambda score, b, h, i, j, t: score + t[0], (copied(torch.ones(4)),))):
            function(**given | copies, score_mod=mod)
        free(copies[name])
        with pytest.raises(ArgumentError, match="whose storage") as raised:
            function(**given | copies)
        assert raised.value.argument == name
    free(mod.tensors[0])
    with pytest.raises(ArgumentError, match="whose storage") as raised:
        function(**given, score_mod=mod)
    assert raised.value.argument == "score_mod.tensors[0]"


@pytest.mark.parametrize("freed", ["q", "k", "v", "out", "lse", "dout", "dlse"])
def test_memory_freed_before_backward_is_refused(freed: str) -> None:
    tensors = {name: behind(x).requires_grad_() for name, x in DENSE.items()}
    out, lse = flashtile.attention(**tensors, return_lse=True)
    tensors |= {"out": out, "lse": lse, "dout": behind(torch.ones_like(out)), "dlse": behind(torch.ones_like(lse))}
    free(tensors[freed])
    with pytest.raises(ArgumentError, match="until backward is done") as raised:
        torch.autograd.backward((out, lse), (tensors["dout"], tensors["dlse"]))
    assert raised.value.argument == freed


def test_low_addresses_are_addresses() -> None:
    """Some processes have their heap where freed tensors seem to lie."""
    with (
        mock.patch("flashtile.call.memory.LOWEST_ADDRESS", 2**63),
    ):
        assert layout_key([Q]) == ((Q.shape, Q.stride(), Q.dtype, Q.device, Q.data_ptr() % 16),)
        assert layout_key([Q, K[:, :0]]) == layout_key([Q.clone(), K.clone()[:, :0]])
        assert CALLS["dense"]().isfinite().all()
        for copied in (torch.clone, behind):
            x = copied(Q)
            free(x)
            with pytest.raises(ArgumentError, match="whose storage"):
                CALLS["dense"](q=x)


# What is no mistake ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "numpys", "pythons"),
    [
        ("dense", {"window": (np.int64(1), np.uint8(2))}, {"window": (1, 2)}),
        ("dense", {"scale": np.float32(0.5)}, {"scale": 0.5}),
        ("dense", {"scale": np.float16(0.5), "softcap": np.int32(3)}, {"scale": 0.5, "softcap": 3.0}),
        ("dense", {"dropout_p": np.float32(0.5), "dropout_seed": np.int64(-3)}, {"dropout_p": 0.5, "dropout_seed": -3}),
        ("dense", {"dropout_p": 0.5, "dropout_seed": np.uint64(2**64 - 3)}, {"dropout_p": 0.5, "dropout_seed": -3}),
        ("varlen", {"max_seqlen_q": np.int64(5), "max_seqlen_k": np.int32(6)}, {"max_seqlen_q": 5, "max_seqlen_k": 6}),
    ],
)
def test_numbers_of_numpy_are_numbers(call: str, numpys: dict[str, Any], pythons: dict[str, Any]) -> None:
    for _ in range(2):  # the second call is remembered
        assert torch.equal(CALLS[call](**numpys), CALLS[call](**pythons))


@pytest.mark.parametrize(
    ("call", "changes"),
    [
        ("dense", {"window": [1, 2]}),
        ("dense", {"window": (-1, None)}),
        ("dense", {"scale": 1}),
        ("dense", {"scale": np.float64(0.5)}),
        ("dense", {"softcap": 0}),
        ("dense", {"dropout_p": 0}),
        ("dense", {"bias": PAIRS[:1, :1, :1, :1]}),
        ("dense", {"bias": PAIRS.as_subclass(Noted), "mask": (PAIRS > 0).as_subclass(Noted)}),
        ("dense", {"bias": torch.nn.Buffer(PAIRS), "sinks": torch.nn.Parameter(PAIRS[0, :, 0, 0])}),
        ("dense", {"q": Q.as_subclass(Described)}),
        ("dense", {"score_mod": functools.partial(lambda c, score, b, h, i, j: score * c, 2.0)}),
        ("dense", {"k": K[:, :, :0], "v": V[:, :, :0]}),
        ("varlen", {"cu_seqlens_q": CU.long(), "max_seqlen_k": 2**40}),
        ("varlen", {"cu_seqlens_q": ints(0, 0, 0)}),
        ("varlen", {"seqused_k": ints(0, 5)}),
        ("paged", {"page_table": ints([0, 1, -7], [2, 3, 99])}),
        ("paged", {"cu_seqlens_k": ints(0, 5, 13), "seqused_k": None}),
        ("paged", {"k": torch.randn(0, 4, 2, 8), "v": torch.randn(0, 4, 2, 6), "seqused_k": ints(0, 0)}),
    ],
)
def test_accepted(call: str, changes: dict[str, Any]) -> None:
    assert CALLS[call](**changes).isfinite().all()
