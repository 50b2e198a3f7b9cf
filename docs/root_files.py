"""A hook of mkdocs.yml: a page whose front matter names a `root_file` shows that file of the repository.

Links are adapted: those into docs/ lead to the site's pages, and so do those to other files that have a page
of their own; those to files that are not published become plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGES = {name.upper() + ".md": name + ".md" for name in ("contributing", "results", "changelog")}
PAGES["README.md"] = "index.md"


def adapted(link: re.Match[str]) -> str:
    """A Markdown link of a file in the repository's root, as a page of the site has it."""
    text, target = link.groups()
    path, sharp, anchor = target.partition("#")
    if "://" in target or not path:
        return link[0]
    page = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    return f"[{text}]({page}{sharp}{anchor})" if page else text


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The text of a page: its own, or that of the file which it shows."""
    name = page.meta.get("root_file")
    if name is None:
        return markdown
    text = (Path(config["config_file_path"]).parent / name).read_text(encoding="utf-8")
    return re.sub(r"(?<!!)\[([^\[\]]+)\]\(([^()\s]+)\)", adapted, text)
