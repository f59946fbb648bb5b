"""Where the inputs of a repeated call come from: its arguments as they are, and what each call makes of them.

A seed is drawn or written into a tensor, an int becomes the lengths of all sequences, autocast and scores of another
dtype cast a tensor, and a function of pairs brings the tensors that it reads.
"""

from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.cache import CacheCall
from ..call.cache_tensors import CacheTensors
from ..call.call import Call, Tensors
from ..call.eight_bit import is_eight_bit
from ..call.window import ExactWindow
from ..expression import MaskMod, ScoreMod
from ..expression.modifier import Modifier
from ..expression.reads import Reads
from .normalize import constants, lengths_of, seed_of
from .out import direct_out
from .settings import is_view_of_keys, may_be_view

SCALARS = (type(None), bool, int, float, str, torch.dtype)
FIELDS = Tensors._fields[:-1]
CACHES = {"k": "k_cache", "v": "v_cache"}  # the keys and values of a call with a cache
FIELDS_WITH_CACHE = (*(CACHES.get(name, name) for name in FIELDS), *CacheTensors._fields)
FUNCTIONS = (("score_mod", ScoreMod), ("mask", MaskMod))  # in the order of their tensors
LENGTHS = ("cache_seqlens", "rotary_start")
VALUES = ("v", "v_cache", "v_descale")  # those of k with v_dim
Values = Sequence[Any]


class Captured(NamedTuple):
    """A function of pairs that is a formula: which argument it is, and all that a call depends on but its tensors. Of a
    bare function, what its formula followed from, and the modifier with that formula.
    """

    argument: int
    kind: type[Modifier]
    key: Hashable
    reads: Reads | None = None
    formula: Modifier | None = None

    @classmethod
    def of(cls, argument: int, kind: type[Modifier], value: Any, q: Tensor) -> "Captured | None":
        """`None` if it has to be traced in each call, or is no function of this kind."""
        if isinstance(value, kind):
            return cls(argument, kind, value.in_call(q).call_key) if value.traced else None
        if not isinstance(value, FunctionType):
            return None
        modifier = kind(value)
        reads = Reads.of(value, modifier.tensors) if modifier.traced else None
        if reads is None or modifier.in_call(q).current_key != kind.of(value, q).current_key:
            return None
        return cls(argument, kind, modifier.in_call(q).call_key, reads, modifier.with_tensors(()))

    def tensors(self, values: Values, q: Tensor) -> tuple[Tensor, ...] | None:
        """The tensors of the argument's function; `None` if it is another one."""
        modifier = values[self.argument]
        if self.reads is not None and self.formula is not None:
            tensors = self.reads.tensors(modifier)
            if tensors is None:
                return None
            modifier = self.formula.with_tensors(tensors)
        elif not isinstance(modifier, self.kind) or not modifier.traced:
            return None
        modifier = modifier.in_call(q)
        if modifier.call_key != self.key:
            return None
        return modifier.tensors if self.kind is ScoreMod else constants(modifier.tensors)


class Made(NamedTuple):
    """A tensor that each call makes of an argument that is none."""

    argument: int | None
    make: Callable[[Any, Tensor, Values], Tensor]  # takes the argument, q and all arguments


class Sources(NamedTuple):
    """The inputs of a call by its arguments. Tensors are in columns: arguments, tensors of functions, made tensors."""

    arguments: tuple[int, ...]  # that are tensors
    places: tuple[int, ...]  # first place of each column among the call's inputs
    columns: tuple[int | None, ...]  # column of each input
    functions: tuple[Captured, ...]
    casts: tuple[tuple[int, torch.dtype], ...]  # dtypes of columns that are cast
    made: tuple[Made, ...]
    out: int | None  # the argument that the results are written into
    out_dtype: torch.dtype | None  # requested of queries of 8 bits
    scalars: tuple[int, ...]  # the other arguments
    view: tuple[int, int, bool] | None  # arguments k and v, and whether v is a view of k; `None` if it cannot be one

    @property
    def only_arguments(self) -> bool:
        others = self.out is not None or self.view is not None
        return not (self.functions or self.casts or self.made or others)

    def captured(self, values: Values, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """The tensors among the arguments, with the functions' tensors behind them; `None` if a function is another
        one, an argument is a tensor now, or v is a view of k where it was none, or is none now.
        """
        if self.view is not None:
            k, v, is_view = self.view
            if (values[k].data_ptr() == values[v].data_ptr()) is not is_view:
                return None
        for one in self.made:
            if one.argument is not None and isinstance(values[one.argument], Tensor):
                return None
        for function in self.functions:
            more = function.tensors(values, tensors[0])
            if more is None:
                return None
            tensors += more
        return tensors

    def complete(self, function: str, values: Values, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """All columns, from what `captured` returns; `None` if kernels may not write into `out`."""
        if self.casts:
            cast = list(tensors)
            for n, dtype in self.casts:
                cast[n] = cast[n].to(dtype)
            tensors = tuple(cast)
        for one in self.made:
            value = None if one.argument is None else values[one.argument]
            tensors += (one.make(value, tensors[0], values),)
        if self.out is not None:
            others = (*values[: self.out], *values[self.out + 1 :])
            v = tensors[self.places.index(FIELDS.index("v"))]
            if direct_out(function, values[self.out], tensors[0], v, others, self.out_dtype) is None:
                return None
        return tensors


def sources_of(function: str, call: Call, values: Values, names: Sequence[str]) -> Sources | None:
    """The sources of a normalized call with these arguments; `None` if it has others."""
    argument_of, inputs = {name: n for n, name in enumerate(names)}, call.inputs
    fields = FIELDS_WITH_CACHE if isinstance(call, CacheCall) else FIELDS
    if "qv" in argument_of and values[argument_of["qv"]] is not None:  # whose q and k are made of two each
        return None
    direct: dict[int, list[int]] = {}  # places of each argument
    casts: dict[int, torch.dtype] = {}
    made: dict[int, Made] = {}  # by place
    for place, (name, x) in enumerate(zip(fields, inputs, strict=False)):
        n = argument_of.get(name)
        if x is None:
            continue
        if n is not None and isinstance(values[n], Tensor):
            if values[n] is not x:
                casts[n] = x.dtype
            direct.setdefault(n, []).append(place)
        elif name == "dropout_seed":
            made[place] = Made(n, lambda seed, q, _: seed_of(function, seed, q.device))
        elif name in VALUES and (v_dim := call.settings.v_dim) is not None:
            of_k = argument_of.get("k_descale") if name == "v_descale" else argument_of[fields[1]]
            if of_k is None or values[of_k].dtype != x.dtype:  # autocast has made k another tensor
                return None
            made[place] = Made(None, values_maker(of_k, None if name == "v_descale" else v_dim))
        elif name in LENGTHS:
            made[place] = Made(n, lengths_maker(name, argument_of.get("cu_seqlens_q")))
        else:
            return None
    functions = []
    for name, kind in FUNCTIONS:
        n = argument_of.get(name)
        captured = None if n is None else Captured.of(n, kind, values[n], call.tensors.q)
        functions += [] if captured is None else [captured]
    used = {*direct, *(x.argument for x in (*functions, *made.values()))}
    scalars = tuple(n for n in range(len(values)) if n not in used)
    if not all(is_scalar(values[n]) for n in scalars):
        return None
    places = (*(x[0] for x in direct.values()), *range(len(fields), len(inputs)), *made)
    column = {place: n for n, place in enumerate(places)}
    column |= {place: column[same[0]] for same in direct.values() for place in same}
    arguments, out = tuple(direct), argument_of.get("out")
    return Sources(
        arguments=arguments,
        places=places,
        columns=tuple(column.get(n) for n in range(len(inputs))),
        functions=tuple(functions),
        casts=tuple((arguments.index(n), dtype) for n, dtype in casts.items()),
        made=tuple(made.values()),
        out=out if out in direct else None,
        out_dtype=call.out_dtype if is_eight_bit(call.tensors.q) else None,
        scalars=scalars,
        view=view_of(argument_of, values, (fields[1], fields[2])),
    )


def view_of(argument_of: dict[str, int], values: Values, names: tuple[str, str]) -> tuple[int, int, bool] | None:
    """`Sources.view` of the arguments that are keys and values."""
    k, v = (argument_of.get(name) for name in names)
    if k is None or v is None or not isinstance(values[v], Tensor) or not may_be_view(values[k], values[v]):
        return None
    return k, v, is_view_of_keys(values[k], values[v])


def values_maker(argument: int, v_dim: int | None) -> Callable[[Any, Tensor, Values], Tensor]:
    """What makes the values of their first columns, or the scales of values, of the keys' argument."""
    return lambda _, q, values: values[argument] if v_dim is None else values[argument][..., :v_dim]


def lengths_maker(name: str, offsets: int | None) -> Callable[[Any, Tensor, Values], Tensor]:
    """What makes an int the lengths `[B]` of all sequences; `offsets` is the argument `cu_seqlens_q`."""
    return lambda n, q, values: lengths_of(name, n, q, None if offsets is None else values[offsets])


def is_scalar(x: Any) -> bool:
    return type(x) in SCALARS or (type(x) in (tuple, ExactWindow) and all(type(n) in SCALARS for n in x))
