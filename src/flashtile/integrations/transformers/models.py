"""Which mask the models of a configuration are written for."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel  # pyright: ignore - optional


@torch.compiler.assume_constant_result
def takes_numbers(config: type[Any]) -> bool:
    """Whether models with a configuration of this class may take their masks for numbers to add to scores.

    Those that do not accept "sdpa" have been written for "eager" alone: they add the mask, or pad it with zeros for
    visible keys. A class that no model names, such as a part's, is taken for one of the models in its package.
    """
    models = [model for model in subclasses(PreTrainedModel) if model.config_class is not None]
    named = [model for model in models if model.config_class is config]
    if named:
        return not any(model._supports_sdpa for model in named)
    package = config.__module__.rpartition(".")[0]
    return any(not model._supports_sdpa for model in models if model.__module__.rpartition(".")[0] == package)


def subclasses(model: type[Any]) -> Iterator[type[Any]]:
    """The classes that are derived from one, without itself."""
    for subclass in model.__subclasses__():
        yield subclass
        yield from subclasses(subclass)
