"""Hooks of MkDocs, which replace links to source files and add the decision pages to the navigation.

Pages link to source files, which the site does not contain. On the site, a link to a source file becomes the link's
text and the file's path.
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
    """Return a page's Markdown without links to files of the repository that are not on the site."""
    return without_outer_links(markdown, PurePosixPath(page.file.src_uri))


def without_outer_links(markdown: str, page: PurePosixPath) -> str:
    """Return the Markdown with links to folders, and to files outside of docs/, replaced by text.

    `page` is the path of the page below docs/, to which its links are relative.
    """

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
