"""Functions made from generated source."""

import linecache
from typing import Any


def defined(name: str, source: str, title: str, names: dict[str, Any]) -> Any:
    """The function of a source, which Triton reads again where Python keeps lines of files."""
    file = f"<{title}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)
    return names[name]
