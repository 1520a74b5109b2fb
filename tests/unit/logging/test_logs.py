"""Every process of the cluster writes to its own log file, native output included."""

import json
import logging
import re
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from tandem.logging.logs import JsonLines, PrettyLines, about

SCRIPT = """
import logging, os, pathlib, sys
from tandem.logging.logs import LogConfig, begin_log
begin_log(LogConfig(pathlib.Path(sys.argv[1]) if sys.argv[1:] else None))
logging.getLogger("router.server").info("serves")
os.write(2, b"a native word\\n")
print("a print", flush=True)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[3]
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True, cwd=root
    )


def test_two_incarnations_share_a_file(tmp_path: Path) -> None:
    file = tmp_path / "not there yet" / "decode-0.log"
    for _ in range(2):
        done = run(str(file))
        assert done.stdout == done.stderr == ""
    text = file.read_text()
    for line in (" INFO router.server: serves\n", "a native word\n", "a print\n"):
        assert text.count(line) == 2
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_without_a_file_the_log_goes_to_stderr() -> None:
    done = run()
    assert done.stderr.splitlines()[0].endswith(" INFO router.server: serves")
    assert done.stdout == "a print\n"


def record(message: str, *values: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("router.walk", logging.INFO, "walk.py", 1, message, values, None)
    made.__dict__.update(fields)
    return made


def test_a_line_for_collectors_is_one_object() -> None:
    lines = JsonLines("decode-0", 17)
    line = lines.format(record("request %s failed: %s", "a~1", 'two "lines"\nof it', **about("a~1")))
    assert "\n" not in line
    fields = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", fields["time"])
    assert abs(datetime.fromisoformat(fields.pop("time")).timestamp() - time.time()) < 60
    assert fields == {
        "level": "INFO",
        "process": "decode-0",
        "incarnation": 17,
        "logger": "router.walk",
        "message": 'request a~1 failed: two "lines"\nof it',
        "request_id": "a~1",
    }
    assert json.loads(JsonLines("", None).format(record("serves"))).keys() == {"time", "level", "logger", "message"}
    try:
        raise ValueError("with reason")
    except ValueError:
        broken = record("oh", exc_info=sys.exc_info())
    assert json.loads(lines.format(broken))["error"].endswith("ValueError: with reason")


def test_a_collector_needs_no_time_zone_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made = record("serves", created=1767225600.25, msecs=250.0)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        assert json.loads(JsonLines("", None).format(made))["time"] == "2026-01-01T00:00:00.250+00:00"
    time.tzset()


def test_a_line_for_people_names_process_and_request() -> None:
    lines = PrettyLines("decode-0", 17)
    assert lines.format(record("serves")).endswith(" INFO decode-0#17 router.walk: serves")
    assert lines.format(record("request %s ends", "a~1", **about("a~1"))).endswith("router.walk: request a~1 ends")
    assert lines.format(record("it ends", **about("a~1"))).endswith("router.walk: it ends [request a~1]")
    assert PrettyLines("100%", None).format(record("serves")).endswith(" INFO 100% router.walk: serves")
    assert PrettyLines("", None).format(record("serves")).endswith(" INFO router.walk: serves")


def test_the_format_is_the_processs_own(tmp_path: Path) -> None:
    file = tmp_path / "log"
    script = SCRIPT.replace(" if sys.argv[1:] else None)", ", LogFormat.JSON), 'decode-0', 17").replace(
        "import LogConfig", "import LogConfig, LogFormat"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", script, str(file)], check=True, cwd=root)
    first = json.loads(file.read_text().splitlines()[0])
    assert (first["process"], first["incarnation"], first["message"]) == ("decode-0", 17, "serves")
