"""Score modifications: functions of a pair's score."""

from .modifier import Modifier
from .purity import SCORE_MOD


class ScoreMod(Modifier):
    """A score modification `fn(score, b, h, q_idx, k_idx, *tensors)` with the tensors it reads.

    `fn` gets the score of a tile after softcap, bias and ALiBi, in the accumulation dtype, and int64 index tensors
    that broadcast against it; it returns the new score, of floating point and with dimensions. It must be a pure
    function of torch operations, elementwise in the score, without random numbers and in-place operations on its
    arguments: it runs on tiles of any size, again in backward, and also on pairs that a mask hides (their result is
    dropped).
    Floating-point `tensors` reach `fn` in the accumulation dtype; those that require a gradient get one.

    Example:
        >>> def farther_is_less(score, b, h, q_idx, k_idx, decay):
        ...     return score - decay[h] * (q_idx - k_idx).abs()
        >>> decay = torch.rand(2, requires_grad=True)  # one number for each head
        >>> q, k, v = (torch.randn(1, 2, 64, 32) for _ in range(3))
        >>> out = flashtile.attention(q, k, v, score_mod=flashtile.ScoreMod(farther_is_less, (decay,)))
        >>> out.sum().backward()
        >>> decay.grad.shape
        torch.Size([2])

    The function is traced once, on stand-ins, into a formula from which kernels are made: `str(score_mod)` shows it.
    A tensor that it finds in a closure, a global or an object becomes one of its `tensors`; a function that computes
    from a whole one (`w.softmax(0)[h]`) is traced in each call. A number there is a constant of the formula; where an
    earlier function had another number in its place, kernels get it as an argument. `tensors` that are converted, as by
    `module.to(dtype)`, are read in their new dtype; they keep their kind of numbers and their dimensions. Reals are in
    the accumulation dtype; a conversion rounds to float16 and bfloat16 only. An index below 0 counts from the end of a
    tensor; what is read outside of it is NaN, or 0 of integers. A function that cannot be traced, as one that branches
    on a value, runs in the backends of torch operations; `flashtile.explain` names the line.

    Under `torch.compile`, make the ScoreMod outside the compiled function. A program of `torch.export` contains the
    formula; of a function that cannot be traced it has the name and a digest, and a process that loads it has to make a
    ScoreMod of the same function first. A ScoreMod can be pickled if it was traced, or if `fn` can be. The signature is
    `score_mod`'s in Dong et al., "Flex Attention", 2024, with the tensors at its end.

    Args:
        fn: the function of torch operations.
        tensors: what `fn` gets after the indices: tensors of any shape and dtype, on q's device.

    Raises:
        ArgumentError: `fn` is not callable, a variable of its closure has no value yet, or an entry of `tensors` is no
            tensor; or `fn` draws random numbers, works in place, or returns a bool, an integer or a number without
            dimensions; or it cannot be traced and reads a tensor that requires a gradient and is not among `tensors`
            (its gradient would silently be lost).
    """

    role = SCORE_MOD
