"""The audit log: its records, rotation, full disks, and that nothing waits for it."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.access import audit_log
from router.access.audit_log import AuditLog
from router.access.callers import Caller
from router.access.client_call import ClientCall
from tandem.metrics.exposition import TEXT, Exposition
from tandem.metrics.registry import Registry
from tandem.protocol.errors import FailedPrecondition


@pytest.fixture
def registry() -> Registry:
    return Registry({"role": "router"})


@pytest.fixture
def log(tmp_path: Path, registry: Registry) -> Iterator[AuditLog]:
    made = AuditLog(tmp_path / "audit.jsonl", registry)
    yield made
    made.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def counts(registry: Registry) -> tuple[float, float]:
    text = Exposition(registry).render(TEXT)[0].decode()
    values = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if not line.startswith("#")}
    return values["tandem_audit_records_total"], values["tandem_audit_records_lost_total"]


def test_a_record_has_client_operation_time_and_size(tmp_path: Path, log: AuditLog, registry: Registry) -> None:
    call = ClientCall("POST /v1/completions", "10.0.0.9", Caller("f00", "acme"), received_unix_s=1e9, received_s=0.0)
    call.queued("req-1", "model", 7)
    call.count_output_tokens(3)
    call.status = 200
    log.write(call)
    log.close()
    (record,) = lines(tmp_path / "audit.jsonl")
    assert record.pop("duration_s") > 0
    assert record == {
        "time": "2001-09-09T01:46:40.000+00:00",
        "request_id": "req-1",
        "tenant": "acme",
        "endpoint": "POST /v1/completions",
        "model": "model",
        "status": 200,
        "error": "",
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "client": "10.0.0.9",
    }
    assert counts(registry) == (1, 0)
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o077 == 0


def test_text_of_a_client_is_one_line(tmp_path: Path, log: AuditLog) -> None:
    log.write(ClientCall('GET /"\n{"tenant": "forged"}\u2028'))
    log.close()
    (record,) = lines(tmp_path / "audit.jsonl")
    assert record["tenant"] == ""


def test_a_renamed_file_is_created_again(tmp_path: Path, log: AuditLog) -> None:
    file = tmp_path / "audit.jsonl"
    log.write(ClientCall("first"))
    while not file.read_text():
        threading.Event().wait(0.01)
    file.rename(tmp_path / "audit.jsonl.1")
    log.write(ClientCall("second"))
    log.close()
    assert [line["endpoint"] for line in lines(tmp_path / "audit.jsonl.1")] == ["first"]
    assert [line["endpoint"] for line in lines(file)] == ["second"]


def test_a_full_disk_loses_records_and_is_counted(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(Path("/dev/full"), registry)
    log.write(ClientCall())
    log.write(ClientCall())
    log.close()
    assert counts(registry) == (0, 2)
    assert "an audit record is lost" in caplog.text


def test_a_slow_disk_loses_records_instead_of_time(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "_WAITING_MAX", 3)
    goes_on = threading.Event()
    log = AuditLog(tmp_path / "audit.jsonl", registry)
    monkeypatch.setattr(log, "_follow_rotation", goes_on.wait)
    for _ in range(10):
        log.write(ClientCall())
    goes_on.set()
    log.close()
    written, lost = counts(registry)
    assert written + lost == 10
    assert written in {3, 4}, "three wait, and one may be in the thread"


def test_a_file_that_cannot_be_opened_is_said_at_the_start(tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(FailedPrecondition, match=r"audit_log: cannot write .*Is a directory"):
        AuditLog(tmp_path, registry)
