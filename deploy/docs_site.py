"""Hooks of MkDocs, which add the linked files of the repository to the site and the decision pages to the navigation.

Pages link to files outside of docs/: sources, results of measurements, folders. The site has a page for each of them,
under `repository/`, to which the links lead there.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_ELSEWHERE = re.compile(r"[a-z]+:")
_DOCS = "docs/"
_SITE = "repository/"
_SECTION = "How it works"
_NO_SEARCH = "---\nsearch:\n  exclude: true\n---\n\n"
"""The beginning of a page that the search of the site leaves out."""
_FENCE = "`" * 5
_ORIGINS: dict[str, str] = {}
"""The path in the repository of each page that is not below docs/, by its path on the site."""


def on_config(config: Any, **_: Any) -> Any:
    """Append the decision pages to the section about how it works, with their index first."""
    docs = Path(config["docs_dir"])
    decisions = sorted(path.relative_to(docs).as_posix() for path in (docs / "decisions").glob("*.md"))
    for entry in config["nav"] or ():
        if isinstance(entry, dict) and _SECTION in entry:
            entry[_SECTION].append({"Decisions": decisions})
    return config


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add a page for each file and folder of the repository that a page links to."""
    from mkdocs.structure.files import File

    root = Path(config["docs_dir"]).parent
    pages = [_DOCS + file.src_uri for file in files if file.src_uri.endswith(".md")]
    for path, target in linked_files(root, pages).items():
        _ORIGINS[target] = path
        files.append(File.generated(config, target, content=_content(root / path, path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return a page's Markdown with links to the pages of the repository's files."""
    uri, root = page.file.src_uri, Path(config["docs_dir"]).parent
    return with_links_on_site(markdown, _ORIGINS.get(uri, _DOCS + uri), uri, root)


def linked_files(root: Path, pages: list[str]) -> dict[str, str]:
    """Return the files and folders outside of docs/ that `pages` link to, with the path of each one's page.

    All are paths in the repository at `root`. Markdown pages among them are searched for links, too.
    """
    found: dict[str, str] = {}
    while pages:
        page = pages.pop()
        for path in _targets((root / page).read_text(encoding="utf-8"), PurePosixPath(page)):
            if not path.startswith(_DOCS) and path not in found and (root / path).exists():
                found[path] = _page_of(root, path)
                if path.endswith(".md"):
                    pages.append(path)
    return found


def with_links_on_site(markdown: str, origin: str, uri: str, root: Path) -> str:
    """Return the Markdown with links that are right on the site.

    `origin` is the page's path in the repository at `root`, to which its links are relative, and `uri` its path on the
    site. A link to a line of a source file leads to the file.
    """

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        if _ELSEWHERE.match(target):
            return link[0]
        path = normpath(str(PurePosixPath(origin).parent / target))
        inside = path.startswith(_DOCS) and (root / path).is_file()
        page = path.removeprefix(_DOCS) if inside else _page_of(root, path)
        return (
            f"[{text}]({relpath(page, str(PurePosixPath(uri).parent))}{(anchor or '') if path.endswith('.md') else ''})"
        )

    return _LINK.sub(replaced, markdown)


def _targets(markdown: str, page: PurePosixPath) -> list[str]:
    links = [link[2] for link in _LINK.finditer(markdown) if not _ELSEWHERE.match(link[2])]
    return [normpath(str(page.parent / target)) for target in links]


def _page_of(root: Path, path: str) -> str:
    """Return the path on the site of the page of a file or folder."""
    if (root / path).is_dir():
        return f"{_SITE}{path}/files.md"
    return _SITE + (path if path.endswith(".md") else f"{path}.md")


def _content(file: Path, path: str) -> str:
    if path.endswith(".md"):
        return file.read_text(encoding="utf-8")
    if file.is_dir():
        names = sorted(child.name + "/" * child.is_dir() for child in file.iterdir() if child.name != "__pycache__")
        text = "\n".join(names)
    else:
        text = file.read_text(encoding="utf-8")
    return f"{_NO_SEARCH}# {path}\n\n{_FENCE}text\n{text}\n{_FENCE}\n"
