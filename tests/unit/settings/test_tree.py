"""The settings tree: its options, its fields by name, and its checks."""

from dataclasses import replace
from pathlib import Path

import pytest

from router.text.answer_syntax.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.mode import Mode
from tandem.settings.cluster import ClusterSettings
from tandem.settings.engine import EngineSettings
from tandem.settings.options import options_of, read_options
from tandem.settings.setting import Topic
from tandem.settings.tls import TlsFiles

OPTIONS = options_of(ClusterSettings)


def test_each_option_has_one_name_one_variable_and_a_help() -> None:
    names = [option.flag for option in OPTIONS] + [alias for option in OPTIONS for alias in option.setting.aliases]
    assert len({*names}) == len(names)
    assert len({option.variable for option in OPTIONS}) == len(OPTIONS)
    assert all(option.help for option in OPTIONS)


def test_the_ten_settings_that_matter_first_come_first() -> None:
    assert [option.topic for option in OPTIONS[:10]] == [Topic.FIRST] * 10
    assert OPTIONS[10].topic is not Topic.FIRST


def test_the_help_names_all_parsers() -> None:
    helps = {option.name: option.help for option in OPTIONS}
    assert all(name in helps["tool_call_parser"] for name in TOOL_CALL_PARSERS)
    assert all(name in helps["reasoning_parser"] for name in REASONING_PARSERS)


def test_values_reach_the_branch_that_has_their_field() -> None:
    settings = ClusterSettings.of(Path("m"), mode="adaptive", page_tokens=64, kv_lease_s=7.0, grpc_port=0)
    assert (settings.router.mode, settings.engine.page_tokens) == (Mode.ADAPTIVE, 64)
    assert (settings.worker.kv_lease_s, settings.router.grpc_port) == (7.0, 0)
    assert settings.with_fields(page_tokens=None, kv_lease_s=5.0, grpc_port=50051, mode="disaggregated") == (
        ClusterSettings.of(Path("m"))
    )


def test_a_name_of_no_field_and_one_of_several_branches_are_refused() -> None:
    with pytest.raises(TypeError, match="page_size: no such setting"):
        ClusterSettings.of(Path("m"), page_size=64)
    with pytest.raises(TypeError, match="rpc_timeout_s"):
        ClusterSettings.of(Path("m"), rpc_timeout_s=1.0)


def test_a_branch_is_checked_with_its_tree() -> None:
    wrong = EngineSettings(page_tokens=0)
    with pytest.raises(InvalidArgument, match="--page-tokens: 0 is not between 1 and 1024"):
        replace(ClusterSettings.of(Path("m")), engine=wrong)


def test_limits_are_named_in_the_units_of_the_option() -> None:
    with pytest.raises(InvalidArgument, match=r"--kv-cache-gib: 2e\+06 is not between 0.000976562 and 1.04858e\+06"):
        read_options(ClusterSettings, {"model": "m", "kv_cache_gib": 2e6})
    with pytest.raises(InvalidArgument, match="--itl-target-ms: -1 is not above 0"):
        read_options(ClusterSettings, {"model": "m", "itl_target_ms": -1.0})


def test_files_of_tls_belong_together() -> None:
    given = {"model": "m", "tls_certificate": Path("/c"), "tls_key": Path("/k")}
    assert read_options(ClusterSettings, given).router.tls == TlsFiles(Path("/c"), Path("/k"))
    assert read_options(ClusterSettings, {"model": "m"}).router.tls is None
    with pytest.raises(InvalidArgument, match="--tls-key: is missing; --tls-certificate and --tls-key belong together"):
        read_options(ClusterSettings, {"model": "m", "tls_client_ca": Path("/a"), "tls_certificate": Path("/c")})
