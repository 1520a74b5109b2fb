"""Errors name the user's options, not the code's settings."""

import pytest
from typer.main import get_command

from tandem.cli.main import app
from tandem.cli.plain_errors import SETTINGS, in_options
from tandem.engine.config import EngineConfig
from tandem.settings.setting import fields_by_name


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ("memory_fraction: 0.1 leaves no room", "--memory-fraction: 0.1 leaves no room"),
        ("raise memory_fraction, lower max_step_tokens", "raise --memory-fraction, lower --max-step-tokens"),
        (
            "kv_cache_bytes: out of memory; lower kv_cache_bytes.",
            "--kv-cache-gib: out of memory; lower --kv-cache-gib.",
        ),
        ("device: 'tpu' is not known; use cpu.", "--device: 'tpu' is not known; use cpu."),
        ("the model of this device is not there", "the model of this device is not there"),
        ("a_file_of_mine: no such file", "a_file_of_mine: no such file"),
        ("--max-tokens: 0 is not between 1 and 9", "--max-tokens: 0 is not between 1 and 9"),
    ],
)
def test_settings_are_options(message: str, read: str) -> None:
    assert in_options(message) == read


def test_every_setting_of_an_engine_is_an_option_of_up() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    up, *others = (
        {name if name.startswith("-") else name.upper() for option in commands[command].params for name in option.opts}
        for command in ("up", "quantize", "train-draft")
    )
    assert set(SETTINGS.values()) <= up.union(*others)
    names = fields_by_name(EngineConfig).keys() - {"served"}
    assert {SETTINGS[name] for name in names if name in SETTINGS} <= up
    by_others = {
        "cuda_graphs",
        "draft_graphs",
        "keep_hidden",
        "mtp",
    }  # of benchmarks and tests, and of workers with --speculate
    assert names - by_others <= SETTINGS.keys()
