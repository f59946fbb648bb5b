"""The precision of float32 products that PyTorch's settings allow."""

import torch


def allows_tf32() -> bool:
    """Whether PyTorch's setting for matrix products on a GPU allows TF32.

    `fp32_precision` reflects settings through any of PyTorch's APIs. `torch.get_float32_matmul_precision` and
    `allow_tf32` raise once `fp32_precision` has been set (torch 2.11 to 2.15).
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
