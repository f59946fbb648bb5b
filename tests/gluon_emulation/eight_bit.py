"""Inline assembly that packs numbers of 8 bits into words. Which elements share a word follows from layouts, of which
the emulation knows nothing: these are the meanings of the assembly in the layouts that its kernels give.
"""

import torch

from .values import Value

LARGEST = 448.0  # of float8_e4m3fn


def rounded(*numbers: Value) -> Value:
    """Four numbers as the bytes of a word."""
    x = torch.stack([x.tensor for x in numbers], -1)
    return Value(x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.int32)[..., 0])


def mma_operand(words: Value) -> Value:
    """The bytes of words that are repeated `[..., 2, 2]`."""
    x = words.tensor[..., :1, 0].contiguous().view(torch.float8_e4m3fn)
    return Value(x.unflatten(-1, (2, 2)))


def with_bytes_of_features(words: Value) -> Value:
    """Words `[keys, words]` of two features: of each `[2 halves, 4, 2 keys]` of keys, `[2 features, 4, 2 pairs]`."""
    x = (
        words.tensor.unflatten(0, (-1, 2, 4, 2)).contiguous().unsqueeze(-1).view(torch.uint8)
    )  # n, half, 4, key, word, byte
    return Value(x.permute(0, 5, 2, 1, 4, 3).contiguous().view(torch.int16)[..., 0].reshape(words.shape))


MEANINGS = {f"// {f.__name__}": f for f in (rounded, mma_operand, with_bytes_of_features)}
