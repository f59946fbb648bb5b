"""Float32 rows in three bfloat16 parts, side by side, for kernels that read them many times (`kernels.split`)."""

import torch
from torch import Tensor

from ....call.call import new_rows
from ...gpu.kernel import Kernel
from ...gpu.replay import Recorder
from ...scalars import strides
from . import KERNELS
from . import arguments as args

SPLIT = Kernel(f"{KERNELS}.split_rows", "split_rows_kernel")
ROWS_AT_ONCE = 64


def split_rows(recorder: Recorder, x: Tensor) -> Tensor:
    """The parts of the rows of `x`, `[B, H, S, D]` or `[T, H, D]` with contiguous features, each padded with zeros to
    the width of a tile.
    """
    dim = args.head_dim(x.shape[-1])
    parts = recorder.new(new_rows(x, x.shape[1], 3 * (dim.CHUNK_0 + dim.CHUNK_1), torch.bfloat16))
    rows = x.shape[2] if x.dim() == 4 else x.shape[0]
    tiles = -(-rows // ROWS_AT_ONCE)
    align = args.alignment([x])
    scalars = {
        **strides("x", x, align),
        **strides("parts", parts, align),
        "num_tiles": tiles,
        "num_heads": x.shape[1],
        "rows": rows,
        "D": dim,
        "ALIGN": align,
        "BLOCK_M": ROWS_AT_ONCE,
        "num_warps": 4,
    }
    recorder.launch(SPLIT, {"x": x, "parts": parts}, tiles * x.shape[1] * args.dense_batch(x), scalars)
    return parts
