"""The page's ES modules as one script: an entry and what it imports, each file once, in order.

The modules under `viewer/` keep to a small grammar, checked here: one-line imports by name, exports at the
start of a line, and no top-level name in two files. So they run as they are in a browser or in Node, and
together as one script once the words `import` and `export` are removed.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).parent / "viewer"
IMPORT = re.compile(r'^import \{ ([\w$, ]+) \} from "\./([\w-]+\.js)";\n', re.M)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b)", re.M)
TOP = re.compile(r"^(?:async )?(?:function\*?|const|let|class) ([\w$]+)", re.M)
EXPORTED = re.compile(r"^export (?:async )?(?:function\*?|const|let|class) ([\w$]+)", re.M)


@lru_cache
def script(entry: str) -> str:
    """`entry` and the modules that it needs, in one script."""
    order: list[str] = []
    _visit(entry, order, ())
    owner: dict[str, str] = {}
    parts = []
    for name in order:
        text = _read(name)
        for needed, other in IMPORT.findall(text):
            missing = {word.strip() for word in needed.split(",")} - set(EXPORTED.findall(_read(other)))
            if missing:
                raise ValueError(
                    f"{name} imports {', '.join(sorted(missing))}, which {other} does not export"
                )
        body = EXPORT.sub("", IMPORT.sub("", text))
        if left := re.search(r"^(?:import|export)\b.*", body, re.M):
            raise ValueError(f"{name} has a line that cannot be inlined: {left[0]}")
        for top in TOP.findall(body):
            if top in owner:
                raise ValueError(f"{top} is a top-level name of both {owner[top]} and {name}")
            owner[top] = name
        parts.append(f"// {name}\n{body.strip()}\n")
    whole = "\n".join(parts)
    if "</script" in whole.lower() or "<!--" in whole:
        raise ValueError(f"{entry}: a script with its own end tag cannot be inlined")
    return whole


@lru_cache
def style(*names: str) -> str:
    """Style sheets, one after the other."""
    return "\n".join(_read(name) for name in names)


def _visit(name: str, order: list[str], above: tuple[str, ...]) -> None:
    if name in above:
        raise ValueError(f"modules import each other in a circle: {' → '.join((*above, name))}")
    if name in order:
        return
    for _, other in IMPORT.findall(_read(name)):
        _visit(other, order, (*above, name))
    order.append(name)


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
