"""Sections of docs/performance.md as Markdown: descriptions, tables, commands and links to runs."""

import math
import re
from collections.abc import Iterable

from benchmarks.results import Run

_REMOVED_OPTIONS = re.compile(r" --direction \w+")
"""Options in saved commands that no longer exist: the direction of `benchmarks.kv_transfer`."""


def repeat_command(run: Run) -> str:
    """Return the run's command without options that its benchmark no longer has."""
    return _REMOVED_OPTIONS.sub("", str(run["command"]))


def section(title: str, text: str, lines: Iterable[str], command: str, runs: Iterable[tuple[str, Run]]) -> str:
    """Return a section: its description, table, the command to repeat it, and links to its runs."""
    links = ", ".join(
        f"[{str(run['commit'])[:8]} of {str(run['date'])[:10]}](../benchmarks/results/{name})"
        for name, run in dict(runs).items()
    )
    return "\n".join(
        [f"\n## {title}\n", f"{text}\n", *lines, "", f"To measure again: `{command}`. Shown: {links}.", ""]
    )


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a table."""
    cells = list(head)
    return [f"| {' | '.join(row)} |" for row in (cells, ["---"] * len(cells), *rows)]


def listed(values: Iterable[float], form: str = ".0f") -> str:
    """Return the numbers with commas between them."""
    return ", ".join(f"{value:{form}}" for value in values)


def or_dash(value: float, form: str) -> str:
    """Return a number as text; a dash if it was not measured."""
    return "–" if math.isnan(value) else f"{value:{form}}"


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{share:.0%}"
