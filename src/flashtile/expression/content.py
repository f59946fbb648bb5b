"""A short text for a function's content, the same in each process: its code, and the values that it is bound to."""

import dis
import functools
import hashlib
import itertools
import os
import sys
import types
import weakref
from collections.abc import Collection
from typing import Any

import torch

from ..dynamo import untraced
from ..errors import ArgumentError
from .purity import SCORE_MOD, Role

# Of exactly these types: a subclass may have attributes, and a `repr` without them.
CONSTANTS = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType, torch.dtype, torch.device)
TUPLES = (tuple, torch.Size)
LOCAL = "-local"
HERE = os.urandom(8)  # this process


@untraced
def content_of(fn: Any, without: Collection[int] = (), role: Role = SCORE_MOD) -> tuple[str, list[Any]]:
    """A digest that functions share if they do the same, as far as that follows from code and constants: of their
    closures, defaults and globals, and of the functions that they call. Imported modules are taken by their names, and
    so are functions of torch. Other objects stand for themselves: then no other process finds the same digest, which
    ends in LOCAL, and holds for as long as the second result lives. The variables of the closure at `without` are left
    out.

    Raises:
        ArgumentError: a variable of the closure has no value yet.
    """
    content = Content(role)
    text = repr(content.of_function(fn, without) if without else content.of(fn))
    return hashlib.sha256(text.encode()).hexdigest()[:16] + LOCAL * content.local, content.numbered


def cells_of(fn: types.FunctionType, without: Collection[int] = (), role: Role = SCORE_MOD) -> list[Any]:
    """The values of a function's closure, but for some.

    Raises:
        ArgumentError: a variable has no value yet.
    """
    found = []
    for n, (name, cell) in enumerate(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)):
        try:
            found += [] if n in without else [cell.cell_contents]
        except ValueError:
            accepted = f"a function whose variables have their values already; `{name}`, which it reads, has none yet"
            raise ArgumentError(role.argument, fn, accepted, role.example) from None
    return found


class Numbered:
    """An object that has no weak references, and its number."""

    def __init__(self, value: Any):
        self.value, self.number = value, next(_numbers)


_numbers = itertools.count()
_weak: dict[int, tuple[Any, int]] = {}  # references to objects and their numbers, by address
_strong: weakref.WeakValueDictionary[int, Numbered] = weakref.WeakValueDictionary()


def number_of(value: Any) -> tuple[int, Any]:
    """A number that no other object has or had, and what has to live for the object to keep it."""
    address = id(value)
    known = _weak.get(address)
    if known is not None and known[0]() is value:
        return known[1], None
    try:
        reference = weakref.ref(value, lambda _: _weak.pop(address, None))
    except TypeError:
        numbered = _strong.get(address) or Numbered(value)
        _strong[address] = numbered
        return numbered.number, numbered
    _weak[address] = reference, next(_numbers)
    return _weak[address][1], None


class Content:
    """The description of one function, in tuples of text and numbers."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.local = False
        self.numbered: list[Any] = []
        self.seen: dict[int, int] = {}  # functions, which may call each other

    def of(self, value: Any) -> Any:
        if type(value) in CONSTANTS:
            return type(value).__qualname__, repr(value)  # 1, 1.0 and True are equal, and mean different programs
        if type(value) in TUPLES:
            return type(value).__qualname__, *map(self.of, value)
        if isinstance(value, types.MethodType):  # each access makes a new object of the same function and instance
            return "method", self.of(value.__func__), self.of(value.__self__)
        if is_imported(value):
            return "module", value.__name__
        if known_by_name(value):
            return "name", value.__module__, value.__qualname__
        if isinstance(value, types.FunctionType) and not value.__dict__:
            return self.of_function(value)
        if type(value) is functools.partial and not value.__dict__:
            return "partial", self.of(value.func), self.of(value.args), self.of(tuple(value.keywords.items()))
        return self.local_to_here(value)

    def of_function(self, fn: types.FunctionType, without: Collection[int] = ()) -> Any:
        if id(fn) in self.seen:
            return "again", self.seen[id(fn)]
        self.seen[id(fn)] = len(self.seen)
        code, names = described(fn.__code__)
        bound = (tuple(cells_of(fn, without, self.role)), fn.__defaults__, tuple((fn.__kwdefaults__ or {}).items()))
        return "function", code, tuple(without), self.of(bound), [(name, self.of_global(fn, name)) for name in names]

    def of_global(self, fn: types.FunctionType, name: str) -> Any:
        """A global variable of a function. One that holds an object may come to hold another, which the function reads
        then; so the variable is meant, and the object is not kept.
        """
        if name not in fn.__globals__:
            return "builtin"
        value = fn.__globals__[name]
        if (
            type(value) in (*CONSTANTS, *TUPLES)
            or isinstance(value, types.FunctionType)
            or is_imported(value)
            or known_by_name(value)
        ):
            return self.of(value)
        return self.local_to_here(fn.__globals__)

    def local_to_here(self, value: Any) -> Any:
        self.local = True
        number, numbered = number_of(value)
        self.numbered.append(numbered)
        return "local", HERE, os.getpid(), number


def is_imported(value: Any) -> bool:
    """Whether a value is the module of its name."""
    return isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value


def known_by_name(value: Any) -> bool:
    """Whether a function or class is torch's own or Python's."""
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, types.NoneType | types.ModuleType | type)
    if not isinstance(value, types.FunctionType | type):
        return False
    return str(value.__module__).partition(".")[0] in ("torch", "builtins") and found_by_name(value)


def found_by_name(value: Any) -> bool:
    """Whether a function or class is what its module has under its name."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


@functools.lru_cache(maxsize=1024)
def described(code: types.CodeType) -> tuple[Any, tuple[str, ...]]:
    """Code without its place in a file, and the global names that it reads, also in functions that it makes."""
    names = {x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = [described(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    variables = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    constants = [constant(x) for x in code.co_consts if not isinstance(x, types.CodeType)]
    content = (code.co_code, code.co_exceptiontable, arguments, variables, constants, [x[0] for x in inner])
    return content, tuple(sorted(names.union(*(x[1] for x in inner))))


def constant(value: Any) -> Any:
    if isinstance(value, tuple):
        return [constant(x) for x in value]
    if isinstance(value, frozenset):  # whose order differs from process to process
        return "frozenset", sorted(repr(constant(x)) for x in value)
    return type(value).__qualname__, repr(value)
