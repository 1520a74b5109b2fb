"""The help of every command in a terminal of 80 columns: names are whole, and the first options come first."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from deploy.cli_page import commands, help_text, whole_help
from tandem.cli.connection import state
from tandem.cli.main import app

COMMANDS = list(commands())
FIRST_OPTIONS = 14


def options_of(words: tuple[str, ...]) -> list[Any]:
    command: Any = get_command(app)
    for word in words:
        command = command.commands[word]
    return [param for param in command.params if param.param_type_name == "option"]


def entries_of(shown: str) -> list[str]:
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown.partition("\nOptions:")[2], re.MULTILINE)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_name_is_cut(words: tuple[str, ...]) -> None:
    shown = whole_help(*words)
    assert all(len(line) <= 80 for line in shown.splitlines())
    entries = entries_of(shown)
    assert sorted(entries) == sorted({*(option.opts[0] for option in options_of(words)), "--help"})
    assert "list[" not in shown, "an option that is given several times names one value"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_shows_the_first_options_and_names_the_groups_of_the_others(words: tuple[str, ...]) -> None:
    shown = help_text(*words, "--help")
    entries = entries_of(shown)
    assert len(entries) <= FIRST_OPTIONS
    options = options_of(words)
    further = [option for option in options if option.rich_help_panel]
    assert set(entries) == {"--help", *(option.opts[0] for option in options if option not in further)}
    if further:
        assert f"--help-all shows {len(further)} more options: {further[0].rich_help_panel}" in shown
        every = help_text(*words, "--help-all")
        assert all(f"\n{option.rich_help_panel}:\n" in every for option in further)


def test_each_command_is_in_a_group_with_its_whole_summary() -> None:
    shown = help_text("--help")
    assert "\nStart and stop:\n  up      Start a cluster and serve until Ctrl-C.\n" in shown
    assert "..." not in shown.partition("\n")[2]
    assert {words[0] for words in COMMANDS if words} == set(re.findall(r"^  ([a-z]\S*)  ", shown, re.MULTILINE))


def test_a_command_with_further_options_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(state.FOLDER_VARIABLE, str(tmp_path))
    assert "no cluster is running" in help_text("status", "--tls-ca", "ca.pem")
