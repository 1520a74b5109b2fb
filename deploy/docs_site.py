"""Hooks of MkDocs: links from pages to files of the repository, and the list of decisions.

Pages link to source files, which the site does not contain. On the site such a link becomes its text and the file's
path.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_ELSEWHERE = re.compile(r"[a-z]+:")


def on_config(config: Any, **_: Any) -> Any:
    """Append the decision pages to the navigation, with their index first."""
    docs = Path(config["docs_dir"])
    decisions = sorted(path.relative_to(docs).as_posix() for path in (docs / "decisions").glob("*.md"))
    if decisions and config["nav"]:
        config["nav"].append({"Decisions": decisions})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's Markdown without links that lead out of the site."""
    return without_outer_links(markdown, PurePosixPath(page.file.src_uri))


def without_outer_links(markdown: str, page: PurePosixPath) -> str:
    """Replace links of `page` (a path below docs/) to folders and to files outside of docs/."""

    def replaced(link: re.Match[str]) -> str:
        text, target, _ = link.groups()
        if _ELSEWHERE.match(target):
            return link[0]
        path = normpath(str(page.parent / target))
        if path.startswith("../"):
            path = path.removeprefix("../")
            return f"{text} (`{path}`)" if path not in text else text
        return text if target.endswith("/") else link[0]

    return _LINK.sub(replaced, markdown)
