"""Writes docs/cli.md, the reference of all commands, from their help: `python -m deploy.cli_page`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from tandem.cli.main import app

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
_HEAD = """# Command line

The help of every command, as `tandem COMMAND --help-all` prints it; `--help` prints the options that matter first. \
`tandem up` and `tandem serve` have their other options in [Settings](settings.md). This page is made of the commands \
by `python -m deploy.cli_page`.

**Shell completion.** `tandem --install-completion` adds the completion of commands and options to the shell in which \
it runs (bash, zsh, fish or PowerShell), from the next shell on. `tandem --show-completion` prints the script instead, \
for images and dotfiles: `tandem --show-completion > ~/.local/share/bash-completion/completions/tandem`.
"""
_IN_SETTINGS = (("up",), ("serve",))
"""The commands whose further options docs/settings.md has."""


def page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD, *(_section(words) for words in commands())]
    return "\n".join(parts)


def commands() -> Iterator[tuple[str, ...]]:
    """Yield the words of each command after `tandem`, beginning with none of them."""
    group: Any = get_command(app)
    yield ()
    for name, command in group.commands.items():
        yield (name,)
        for inner in getattr(command, "commands", ()):
            yield name, inner


def help_text(*words: str) -> str:
    """Return what `tandem WORDS` prints in a terminal of 80 columns; `words` includes --help or --help-all."""
    return CliRunner().invoke(app, words, prog_name="tandem", env={"COLUMNS": "80"}).output


def whole_help(*words: str) -> str:
    """Return the help of `tandem WORDS` with all options. Only commands with further options have --help-all."""
    first = help_text(*words, "--help")
    return help_text(*words, "--help-all") if "--help-all" in first else first


def _section(words: tuple[str, ...]) -> str:
    shown = help_text(*words, "--help") if words in _IN_SETTINGS else whole_help(*words)
    return f"## {' '.join(('tandem', *words))}\n\n```text\n{shown}```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
