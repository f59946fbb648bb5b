"""Which Pythons run this package. Imported first, and written so that older ones can read it."""

import sys

OLDEST = (3, 11)

if sys.version_info < OLDEST:
    found, needed = (".".join(map(str, version[:2])) for version in (sys.version_info, OLDEST))
    raise ImportError(f"flashtile needs Python {needed} or newer; this is {found}")
