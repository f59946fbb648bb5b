"""Extension of mkdocstrings: the section `Example:` of a docstring is a section of examples, not a quotation."""

import re
from typing import Any

import griffe  # pyright: ignore[reportMissingImports] - of the extra `docs`


class Examples(griffe.Extension):
    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
