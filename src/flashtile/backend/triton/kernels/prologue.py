"""The shared prologue of forward and backward kernels: keys, values and features of one sequence and head."""

from typing import NamedTuple

import triton
import triton.language as tl

from .keys import key_value_head
from .rng import Stream, load_stream
from .scores import load_slope, softmax_factor
from .sequences import key_seqlen


class HeadInfo(NamedTuple):
    """A sequence and query head, and values of its features. Absent ones are 0: functions of Triton 3.6 cannot return
    `None`.
    """

    sequence: tl.tensor  # int64
    head: tl.tensor  # a number, or [M, 1]
    shift: tl.tensor  # seqlen_k - seqlen_q, in an unsharded call
    factor: tl.tensor  # makes base-2 logarithms of scores
    slope: tl.tensor  # a number, or [M, 1]
    stream: Stream  # of dropout
    bias: tuple[tl.tensor, ...]  # its tile, where all blocks of a program have the same; else they load their own


@triton.jit
def batch_index(params, work):
    """The sequence of a work tile as a 64-bit index; 0 for packed tokens that belong to none."""
    return sequence_index(work.sequence, params.lengths.batch)


@triton.jit
def sequence_index(sequence, batch):
    return tl.where(sequence < batch, sequence, 0).to(tl.int64)


@triton.jit
def prologue(k, v, params, sequence, b, seqlen_q, head, head_k, CONFIG: tl.constexpr):
    """Keys and values of a sequence and key head, and features of its query heads: `head` is a number or `[M, 1]`."""
    seqlen_k = key_seqlen(params.lengths, sequence)
    kv = key_value_head(k, v, params.lengths, b, head_k, seqlen_k, CONFIG)
    return kv, head_info(params, b, head, seqlen_k.seqlen - seqlen_q + params.window.diagonal)


@triton.jit
def with_bias(info, bias):
    """The features with a tile of the bias, in a tuple, or an empty one."""
    return HeadInfo(info.sequence, info.head, info.shift, info.factor, info.slope, info.stream, bias)


@triton.jit
def head_info(params, b, head, shift):
    """Load the features of a sequence and head."""
    slope, stream = 0.0, Stream(0, 0, 0)
    if params.scores.slopes.data is not None:
        slope = load_slope(params.scores.slopes, b, head, params.lengths.batch)
    if params.dropout.threshold is not None:
        stream = load_stream(params.dropout, b, head)
    return HeadInfo(b, head, shift, softmax_factor(params.scores), slope, stream, ())
