"""Functions of pairs by their keys, by which an operator's schema names them.

An operator takes tensors and scalars, no Python functions, so a key travels through it. The key of a function that can
be traced is its formula: a program that was exported by one process has all of it. Other functions are registered under
a digest of their content: a lambda written in a training loop registers once, and a program that was exported finds in
another process either the same function or none.
"""

import warnings
from collections.abc import Callable

from torch import Tensor

from ..errors import AttentionError, AttentionWarning
from .content import LOCAL
from .formula import PREFIX, Formula, Untraced
from .purity import MASK_MOD, SCORE_MOD, Role

_functions: dict[str, Callable[..., Tensor]] = {}
_untraced: dict[str, Untraced] = {}
MANY_FUNCTIONS = 1000


def register(key: str, fn: Callable[..., Tensor], untraced: Untraced | None = None) -> None:
    """Keep a function under its key; `untraced` is why it is no formula."""
    new = key not in _functions
    _functions[key] = fn
    if untraced is not None:
        _untraced[key] = untraced
    if new and len(_functions) == MANY_FUNCTIONS:
        message = (
            f"{MANY_FUNCTIONS} different score_mod and mask functions have been registered, and each stays in memory. "
            "If a number in the closure changes from call to call, pass it as a tensor: ScoreMod(fn, (tensor,))."
        )
        warnings.warn(message, AttentionWarning, stacklevel=5)


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
    fn = function_of(key, role)
    return fn if isinstance(fn, Formula) else _untraced[key]


def function_of(key: str, role: Role) -> Callable[..., Tensor]:
    fn = _functions.get(key)
    if fn is None and key.startswith(PREFIX):
        fn = Formula.of_key(key)
        register(key, fn)
    if fn is None:
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
    return fn


def is_local(key: str) -> bool:
    """Whether a function reads objects of this process that may change, so that nothing can be kept for it."""
    return key.endswith(LOCAL)
