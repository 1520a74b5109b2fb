"""Figures of the source text of a tree: module constants, flat folders, and docstrings that begin as fragments."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

FRAGMENTS = (
    "Of", "What", "How", "Whether", "Who", "Where", "When", "As", "By",
    "From", "Behind", "These", "It", "To", "That", "Which",
)  # fmt: skip
"""First words of docstrings that are no sentences."""
_OUTSIDE = {".venv", ".git", "generated", "node_modules", "build", "__pycache__"}


def python_files(tree: Path) -> list[Path]:
    """Returns the tree's own Python files, without generated ones and environments."""
    found = (path for path in tree.rglob("*.py") if not _OUTSIDE.intersection(path.relative_to(tree).parts))
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(tree).parts))


def lines(path: Path) -> int:
    """Returns the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def number_constants(path: Path) -> list[str]:
    """Returns the names of a file's module-level constants that are numbers, or computed from numbers alone."""
    found: list[str] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = node.target, node.value
        else:
            continue
        if isinstance(targets, ast.Name) and _is_number(value):
            found.append(targets.id)
        elif isinstance(targets, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = zip(targets.elts, value.elts, strict=False)
            found += [each.id for each, part in pairs if isinstance(each, ast.Name) and _is_number(part)]
    return found


def flat_folders(files: Iterable[Path], tree: Path) -> Counter[str]:
    """Returns the number of Python files directly in each folder."""
    return Counter(path.parent.relative_to(tree).as_posix() for path in files)


def docstrings(path: Path) -> Iterator[str]:
    """Yields the docstrings of a file: of the module, of classes, functions and attributes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                text = child.value.value
                if isinstance(text, str) and text.strip():
                    yield text.strip()


def is_fragment(docstring: str) -> bool:
    """Returns True if a docstring begins with one of the words of `FRAGMENTS`."""
    return docstring.split(maxsplit=1)[0].rstrip(",:;.") in FRAGMENTS


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)
