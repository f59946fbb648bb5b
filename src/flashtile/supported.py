"""Which Pythons and PyTorches run this package. Imported first, and written so that older ones can read it."""

import re
import sys

OLDEST = (3, 11)
OLDEST_TORCH = (2, 10)


def dotted(version):
    return ".".join(map(str, version))


if sys.version_info < OLDEST:
    found, needed = dotted(sys.version_info[:2]), dotted(OLDEST)
    raise ImportError(f"flashtile needs Python {needed} or newer; this is {found}")

try:
    from torch import __version__ as torch_version
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(f"flashtile needs PyTorch {dotted(OLDEST_TORCH)} or newer, which is not installed") from None

if tuple(map(int, re.findall(r"\d+", str(torch_version))[:2])) < OLDEST_TORCH:
    raise ImportError(f"flashtile needs PyTorch {dotted(OLDEST_TORCH)} or newer; this is {torch_version}")
