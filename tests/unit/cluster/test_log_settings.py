"""Log settings of each process, from the options to the processes of the router."""

from pathlib import Path

import pytest

from router.front.process import FrontConfig
from tandem.logging.logs import TO_STDERR, LogConfig, LogFormat
from tandem.net.security.api_keys import KeySource
from tandem.protocol.errors import InvalidArgument
from tandem.settings.cluster import ClusterSettings
from tandem.settings.listeners import DEFAULT_LIMITS
from tandem.settings.tls import TlsFiles


def test_each_process_has_a_file_of_the_size_that_was_asked_for() -> None:
    config = ClusterSettings.of(Path("m"), log_folder=Path("/l"), log_format="json", log_max_mib=3)
    assert config.log_of("decode-0") == LogConfig(Path("/l/decode-0.log"), LogFormat.JSON, 3 << 20)
    assert ClusterSettings.of(Path("m")).log_of("router") == LogConfig()


@pytest.mark.parametrize("log", [TO_STDERR, LogConfig(Path("/l/router.log"), LogFormat.JSON, 3 << 20)])
def test_front_processes_are_told(log: LogConfig) -> None:
    """They also hold the router's log file open, and would continue to write to a rotated one."""
    tls = TlsFiles(Path("/certificate"), Path("/private"))
    keys = KeySource(("key",), Path("/keys"), frozenset({"reader"}))
    config = FrontConfig("front-0", "127.0.0.1", 1, 2, keys, log, DEFAULT_LIMITS, tls)
    assert FrontConfig.from_json(config.to_json()) == config


def test_a_file_of_no_size_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="--log-max-mib: 0 is less than 1"):
        ClusterSettings.of(Path("m"), log_max_mib=0)
