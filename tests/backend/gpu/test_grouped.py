"""Kernels whose parameters are grouped: their flat arguments, in a language that returns functions as they are."""

from typing import Any, NamedTuple

import pytest

from flashtile.backend.gpu.grouped import Captured, Language, kernel, with_captured, without


class Pointer: ...


class Scalar: ...


class constexpr: ...  # noqa: N801


def jit(function: Any, **options: Any) -> Any:
    function.__dict__.update(options)
    return function


LANGUAGE = Language(jit, Pointer, Scalar, constexpr)


class Rows(NamedTuple):
    data: Pointer
    stride_b: Scalar


class Lengths(NamedTuple):
    seqlen: Scalar
    pages: Rows
    batch: Scalar


class Inputs(NamedTuple):
    batch: Scalar
    captured: Captured


seen: list[Any] = []  # what the last kernel was called with


def rows_kernel(q: Rows, lengths: Lengths, inputs: Inputs, out: Pointer, CONFIG: constexpr) -> None:
    seen[:] = [q, lengths, inputs, out, CONFIG]


UnpagedLengths = without(Lengths, "pages")
LengthsOfOnePage = without(Lengths, pages=without(Rows, "stride_b"))


def unpaged_kernel(lengths: UnpagedLengths, out: Pointer) -> None:  # type: ignore[valid-type]
    seen[:] = [lengths, out]


def one_page_kernel(lengths: LengthsOfOnePage) -> None:  # type: ignore[valid-type]
    seen[:] = [lengths]


def arguments_of(kernel: Any) -> list[str]:
    return list(kernel.__code__.co_varnames[: kernel.__code__.co_argcount])


def test_flat_arguments() -> None:
    """Pointers, numbers that Triton does not specialize with strides first, and constants. `batch` is in two groups."""
    flat = kernel(rows_kernel, LANGUAGE)
    strides = ["stride_q_b", "stride_pages_b"]
    assert arguments_of(flat) == ["q", "pages", "out", *strides, "seqlen", "batch", "CONFIG"]
    assert flat.do_not_specialize == [*strides, "seqlen", "batch"]
    assert flat.__annotations__ == {"CONFIG": constexpr}
    flat(**{name: name.upper() for name in arguments_of(flat)})
    pages = "PAGES", "STRIDE_PAGES_B"
    assert seen == [("Q", "STRIDE_Q_B"), ("SEQLEN", pages, "BATCH"), ("BATCH", None), "OUT", "CONFIG"]
    assert [type(x) for x in (*seen[:3], seen[1].pages)] == [Rows, Lengths, Inputs, Rows]


def test_captured_tensors_are_arguments() -> None:
    flat = kernel(rows_kernel, LANGUAGE)
    assert with_captured(flat, ()) is flat
    captured = with_captured(flat, (2, 0))
    assert captured is with_captured(flat, (2, 0))
    more = ["size_captured0_0", "size_captured0_1", "stride_captured0_0", "stride_captured0_1"]
    assert sorted(set(arguments_of(captured)) - set(arguments_of(flat))) == ["captured0", "captured1", *more]
    captured(**{name: name for name in arguments_of(captured)})
    assert seen[2] == ("batch", ("captured0", *more, "captured1"))


def test_absent_fields_are_no_arguments() -> None:
    flat = kernel(unpaged_kernel, LANGUAGE)
    assert arguments_of(flat) == ["out", "seqlen", "batch"]
    flat(out=1, seqlen=2, batch=3)
    assert seen == [(2, (None, None), 3), 1]
    assert type(seen[0]) is Lengths
    flat = kernel(one_page_kernel, LANGUAGE)
    assert arguments_of(flat) == ["pages", "seqlen", "batch"]
    flat(pages=1, seqlen=2, batch=3)
    assert seen == [(2, (1, None), 3)]


def test_every_argument_has_one_kind() -> None:
    """A parameter that is forgotten among the kinds is no number by silence."""

    def untyped(q: Rows, n) -> None: ...  # type: ignore[no-untyped-def]

    def doubled(q: Rows, inputs: Inputs, batch: Pointer) -> None: ...

    for function, name in ((untyped, "n"), (doubled, "batch")):
        with pytest.raises(TypeError, match=f"{name} is neither"):
            kernel(function, LANGUAGE)
