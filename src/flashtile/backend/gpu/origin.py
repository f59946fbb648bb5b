"""The origin of kernels, in words: an archive, or the installed Triton."""

from collections.abc import Sequence

import torch

from .archive import archive_for, archive_of
from .installed import triton_version
from .replay import Launch


def kernel_origin(launches: Sequence[Launch], device: torch.device) -> str:
    """The origin of the kernels of these launches on a device."""
    archive = archive_of(device)
    if archive is None:
        return on_the_spot()
    ahead = [archive.key(x.kernel, x.scalars, x.pointers) is not None for x in launches]
    if all(ahead):
        return f"{len(ahead)} of {len(ahead)} {archive.words}"
    return f"{sum(ahead)} of {len(ahead)} {archive.words}, the others {on_the_spot()}"


def archive_in_words(arch: str) -> str:
    """The origin of the kernels for an architecture."""
    archive = archive_for(arch)
    if archive is None:
        return on_the_spot()
    return f"{len(archive)} {archive.words} ({archive.path}), the others {on_the_spot()}"


def on_the_spot() -> str:
    version = triton_version()
    return "compiled at first use by Triton " + ("(not installed)" if version is None else ".".join(map(str, version)))
