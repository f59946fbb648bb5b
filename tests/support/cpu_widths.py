"""Widths of vectors that tests of the CPU's kernels go through, and which of them this processor has."""

import os
from unittest import mock

import pytest

from flashtile import BackendError
from flashtile.backend.cpu import targets

WIDTHS = ("avx512", "avx2", "baseline")


def usable(width: str) -> bool:
    with mock.patch.dict(os.environ, {targets.VECTORS_VARIABLE: width}):
        try:
            return targets.host() is not None
        except BackendError:
            return False


def request_width(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls use vectors of this width, or skip the test."""
    if not usable(width):
        pytest.skip(f"this processor has no {width}")
    monkeypatch.setenv(targets.VECTORS_VARIABLE, width)
