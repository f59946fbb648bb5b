"""Functions of pairs by their keys, by which an operator's schema names them.

An operator takes tensors and scalars, no Python functions, so a key travels through it. The key of a function that can
be traced is its formula: a program that was exported by one process has all of it. Other functions are registered under
a digest of their content: a lambda written in a training loop registers once, and a program that was exported finds in
another process either the same function or none.
"""

import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import AttentionError, AttentionWarning
from .content import LOCAL
from .formula import PREFIX, Formula, Untraced
from .purity import MASK_MOD, SCORE_MOD, Role


class Registered(NamedTuple):
    """A function, and why it is no formula."""

    fn: Callable[..., Tensor]
    untraced: Untraced | None = None


class LocalKey(str):
    """The key of a function that reads objects of this process. The function lives as long as its key, so that no
    object outlives the calls that need it.
    """

    registered: Registered
    numbered: list[Any]  # the objects' numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


_functions: dict[str, Registered] = {}
_local: weakref.WeakValueDictionary[str, LocalKey] = weakref.WeakValueDictionary()
MANY_FUNCTIONS = 1000


def register(key: str, fn: Callable[..., Tensor], untraced: Untraced | None = None) -> None:
    """Keep a function under its key; `untraced` is why it is no formula. Of many, formulas go first, as their keys have
    all of them.
    """
    new = key not in _functions
    if new and len(_functions) >= MANY_FUNCTIONS:
        formulas = (name for name, x in [*_functions.items()] if isinstance(x.fn, Formula))
        _functions.pop(next(formulas, ""), None)
    _functions[key] = Registered(fn, untraced)
    if new and untraced is not None and len(_functions) == MANY_FUNCTIONS + 1:
        message = (
            f"{MANY_FUNCTIONS} score_mod and mask functions that cannot be traced have been registered, and each "
            "stays in memory. If a number in the closure changes from call to call, pass it as a tensor: "
            "ScoreMod(fn, (tensor,))."
        )
        warnings.warn(message, AttentionWarning, stacklevel=5)


def register_local(key: str, fn: Callable[..., Tensor], untraced: Untraced, numbered: list[Any]) -> LocalKey:
    """The key of a function that reads objects of this process, which is known while this key lives."""
    local = _local.get(key) or LocalKey(key)
    local.registered, local.numbered = Registered(fn, untraced), numbered
    _local[str(key)] = local
    return local


def registered(key: str) -> Registered | None:
    local = _local.get(key)
    return _functions.get(key) if local is None else local.registered


def held(*keys: str | None) -> list[LocalKey | None]:
    """What keeps the functions of these keys."""
    return [None if key is None else _local.get(key) for key in keys]


def score_mod_function(key: str) -> Callable[..., Tensor]:
    """The function of torch operations with the key of a ScoreMod.

    Raises:
        AttentionError: it could not be traced, and has not been registered in this process.
    """
    return function_of(key, SCORE_MOD)


def mask_mod_function(key: str) -> Callable[..., Tensor]:
    """The function of torch operations with the key of a MaskMod.

    Raises:
        AttentionError: as `score_mod_function`.
    """
    return function_of(key, MASK_MOD)


def score_mod_formula(key: str) -> Formula | Untraced:
    """The formula with the key of a ScoreMod, or why there is none.

    Raises:
        AttentionError: as `score_mod_function`.
    """
    return formula_of(key, SCORE_MOD)


def mask_mod_formula(key: str) -> Formula | Untraced:
    """The formula with the key of a MaskMod, or why there is none.

    Raises:
        AttentionError: as `score_mod_function`.
    """
    return formula_of(key, MASK_MOD)


def formula_of(key: str, role: Role) -> Formula | Untraced:
    found = known(key, role)
    return found.fn if isinstance(found.fn, Formula) else found.untraced or Untraced("it is no formula")


def function_of(key: str, role: Role) -> Callable[..., Tensor]:
    return known(key, role).fn


def known(key: str, role: Role) -> Registered:
    found = registered(key)
    if found is None and key.startswith(PREFIX):
        register(key, Formula.of_key(key))
        found = registered(key)
    if found is not None and isinstance(found.fn, Formula) and found.fn.is_mask is not role.hides:
        raise AttentionError(
            f"a program contains as {role.argument} the formula of the other one: {found.fn}\n"
            f"  accepted: the key of a flashtile.{role.owner}"
        )
    if found is None:
        accepted = f"a flashtile.{role.owner} of the same function, made in this process before the program runs: " + (
            "a function that reads no objects but constants, modules and functions; what it reads of tensors are its "
            "`tensors`"
            if is_local(key)
            else "the same code, the same numbers in its closure, defaults and globals, and the same version of Python"
        )
        raise AttentionError(
            f"a program contains the {role.argument} {key!r}, which this process does not know: a program that was "
            f"exported has the name of a function that cannot be traced, not its code.\n  accepted: {accepted}"
        )
    return found


def is_local(key: str) -> bool:
    """Whether a function reads objects of this process that may change, so that nothing can be kept for it."""
    return key.endswith(LOCAL)
