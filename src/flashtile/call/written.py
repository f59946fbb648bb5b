"""Tensors that kernels write in place: autograd has to know, and a few tensors refuse it."""

import torch
from torch import Tensor


def is_frozen(x: Tensor) -> bool:
    """Whether PyTorch does not allow writing into a tensor here: an inference tensor outside of inference mode."""
    return x.is_inference() and not torch.is_inference_mode_enabled()


def mark_written(*tensors: Tensor) -> None:
    """Count a write into each tensor, as operations of PyTorch do: a backward pass that saved one raises an error."""
    torch.autograd.graph.increment_version(tensors)
