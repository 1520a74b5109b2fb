"""The settings that decide if a worker can be taken over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.engine.config import EngineConfig
from tandem.protocol.messages import Role
from tandem.protocol.policy_name import PolicyName
from tandem.settings.secrets import Secrets
from tandem.worker.config import WorkerConfig
from tandem.worker.reporting.description import differences, served_of, tuning_of

CONFIG = WorkerConfig("decode-0", Role.DECODE, EngineConfig.of(Path("m")), secrets=Secrets("secret", "key"))


def changed(**settings: Any) -> WorkerConfig:
    return CONFIG.with_fields(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": Path("n")},
        {"dtype": "bfloat16"},
        {"page_tokens": 32},
        {"token": "t"},
        {"served_model_names": ("x",)},
    ],
)
def test_another_thing_served_is_named(settings: dict[str, Any]) -> None:
    other = changed(**settings)
    assert differences(served_of(CONFIG), served_of(other)) == tuple(settings)
    assert differences(tuning_of(CONFIG), tuning_of(other)) == ()


@pytest.mark.parametrize(
    "settings", [{"max_batch_requests": 3}, {"kv_cache_bytes": 1}, {"prefix_cache": False}, {"quantization": "int8"}]
)
def test_another_way_to_serve_it_is_named(settings: dict[str, Any]) -> None:
    other = changed(**settings)
    assert differences(served_of(CONFIG), served_of(other)) == ()
    assert differences(tuning_of(CONFIG), tuning_of(other)) == tuple(settings)


@pytest.mark.parametrize(
    "settings",
    [{"worker_id": "decode-1"}, {"role": Role.BOTH}, {"step_policy": PolicyName.CHUNKED}, {"outlive_s": 9.0}],
)
def test_settings_that_are_reported_separately_do_not_differ(settings: dict[str, Any]) -> None:
    other = changed(**settings)
    assert differences(served_of(CONFIG), served_of(other)) == ()
    assert differences(tuning_of(CONFIG), tuning_of(other)) == ()


def test_secrets_are_compared_but_not_shown() -> None:
    facts = str((*served_of(CONFIG), *tuning_of(CONFIG)))
    assert "secret" not in facts
    assert "'key'" not in facts


def test_a_setting_of_another_release_is_a_difference() -> None:
    assert differences((("a", "1"), ("b", "2")), (("a", "1"),)) == ("b",)
