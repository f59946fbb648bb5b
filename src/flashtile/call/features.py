"""The table of features: what each optional argument of a call is.

A feature is a field of `Tensors` or `Settings` (`call.py`), declared once, with a `Feature` in its annotation. Checks,
autocast, the operators' schemas, the requested gradients, a problem's features, kernel arguments and the arguments of
`explain` follow from there.
"""

import types
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

DENSE, VARLEN, CACHE = "dense", "varlen", "cache"  # the three public functions, and their operators
EVERYWHERE = (DENSE, VARLEN, CACHE)
PACKED = (VARLEN, CACHE)

SCORES = "scores"  # dtype: q's, or float32
BOOL = "bool"
INDEX = "index"  # int32 or int64
SEED = "seed"  # int64
DESCALE = "descale"  # float32
INDEX_DTYPES = (torch.int32, torch.int64)

PAIRS = ("B|1", "H|1", "Sq|1", "Sk|1")  # n|1: a dimension that may be broadcast
PER_HEAD = ("H",)
PER_SEQUENCE_AND_HEAD = ("B", "H")
OF_ROWS = (("Hkv",), ("B", "Hkv"), ("B", "Hq", "Sq"), ("Hq", "Tq"))
OF_KEYS = (
    ("Hkv",), ("B", "Hkv"), ("B", "Hkv", "Sk"), ("Hkv", "Tk"), ("num_pages", "Hkv"), ("num_pages", "page_size", "Hkv"),
)  # fmt: skip

# An empty list is `None` for operators: AOTInductor passes it as such (torch 2.13), which `Tensor[]` does not take, and
# traces of TorchScript have no `Tensor?[]`.
TENSOR_LIST = "Tensor[]?"
SCHEMA_TYPES = {  # a `Scalar` may be a symbol, which a `float` may not
    Tensor: "Tensor", Sequence[Tensor]: TENSOR_LIST, int: "SymInt", float: "Scalar", bool: "bool", str: "str",
}  # fmt: skip


class Feature(NamedTuple):
    """One optional argument: a tensor with `shapes` and a dtype, or a scalar without."""

    shapes: tuple[tuple[str, ...], ...] = ()  # accepted ones, of sizes by name
    dtype: str = ""
    gradient: bool = False
    layouts: tuple[str, ...] = EVERYWHERE  # that take it
    advice: str = ""  # for a tensor of another dtype
    public: bool = True  # an argument of the public functions under this name
    score_term: bool = False  # added to the scores
    symbol: str = ""  # name in formulas and kernels, if it is another one

    def dtypes(self, of_q: torch.dtype) -> tuple[torch.dtype, ...]:
        if self.dtype == SCORES:
            return tuple({of_q, torch.float32}) if of_q.itemsize > 1 else (torch.float32,)
        others = {BOOL: (torch.bool,), INDEX: INDEX_DTYPES, SEED: (torch.int64,), DESCALE: (torch.float32,)}
        return others[self.dtype]

    @property
    def broadcasts(self) -> bool:
        return any(size.endswith("|1") for shape in self.shapes for size in shape)

    def sizes(self, **by_name: int) -> list[tuple[int, ...]]:
        """The accepted shapes, with every dimension that may be broadcast at its full size."""
        return [tuple(by_name[size.removesuffix("|1")] for size in shape) for shape in self.shapes]


class Field(NamedTuple):
    """A field of `Tensors` or `Settings`."""

    name: str
    kind: str  # in an operator's schema, without `?`
    optional: bool
    feature: Feature | None  # `None`: every call has it

    def in_layout(self, layout: str) -> bool:
        return self.feature is None or layout in self.feature.layouts

    def schema(self, layout: str) -> str:
        """The argument of an operator. Packed queries have offsets in every call of `attention_varlen`."""
        optional = self.optional and not (layout == VARLEN and self.name == "cu_seqlens_q")
        return f"{self.kind}{'?' * optional} {self.name}"


def fields_of(owner: type) -> tuple[Field, ...]:
    """The table that the annotations of `owner` are."""
    fields = []
    for name, hint in get_type_hints(owner, include_extras=True).items():
        feature = None
        if get_origin(hint) is Annotated:
            hint, feature = get_args(hint)
        optional = isinstance(hint, types.UnionType)
        kind = SCHEMA_TYPES[next(x for x in get_args(hint) if x is not types.NoneType) if optional else hint]
        fields.append(Field(name, kind, optional, feature))
    return tuple(fields)


def one_of(dtypes: Sequence[Any]) -> str:
    return " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
