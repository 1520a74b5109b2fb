"""Log settings of each process, from the options on."""

from pathlib import Path

import pytest

from tandem.logging.logs import LogConfig, LogFormat
from tandem.protocol.errors import InvalidArgument
from tandem.settings.cluster import ClusterSettings


def test_each_process_has_a_file_of_the_size_that_was_asked_for() -> None:
    config = ClusterSettings.of(Path("m"), log_folder=Path("/l"), log_format="json", log_max_mib=3)
    assert config.log_of("decode-0") == LogConfig(Path("/l/decode-0.log"), LogFormat.JSON, 3 << 20)
    assert ClusterSettings.of(Path("m")).log_of("router") == LogConfig()


def test_a_file_of_no_size_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="--log-max-mib: 0 is less than 1"):
        ClusterSettings.of(Path("m"), log_max_mib=0)
