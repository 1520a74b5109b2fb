"""Tables of the commands, as text."""

import io
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tandem.cli.connection import state
from tandem.cli.connection.controller_client import ControllerClient
from tandem.cli.connection.router import ServerView
from tandem.cli.observe.status import absences, remarks, summary, worker_table
from tandem.cli.requests.timeline_table import timeline_rows, timeline_table
from tandem.client import Answer, FinishReason, Prompt
from tandem.protocol.generated.tandem.v1 import inference_pb2
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent, Timeline, TransferStats
from tandem.protocol.lifecycle.placement import PlacementStats, PromptCost
from tandem.protocol.messages import Absence

ROOT = Path(__file__).parents[3]
MS = 1_000_000


def stamps(**at_ms: float) -> tuple[EventTime, ...]:
    return tuple(EventTime(LifecycleEvent[name], int(ms * MS)) for name, ms in at_ms.items())


def text(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(table)
    return out.getvalue()


def answer_of(timeline: Timeline, prompt_tokens: int, tokens: int) -> Answer:
    return Answer("r", 0, "…", "", (), (), (), FinishReason.LENGTH, "", prompt_tokens, tokens, 0, 0, Prompt(), timeline)


def disaggregated() -> Answer:
    event_times = stamps(
        RECEIVED=0, PREFILL_STARTED=5, PREFILL_FINISHED=25, FIRST_TOKEN=27, TRANSFER_STARTED=15, TRANSFER_FINISHED=29,
        DECODE_STARTED=31, FINISHED=127,
    )  # fmt: skip
    timeline = Timeline(event_times, TransferStats(2_500_000, 3, "UCX", 5 * MS), "prefill-0", "decode-0")
    return answer_of(timeline, 40, 11)


def test_a_disaggregated_request() -> None:
    rows = {row.name: row for row in timeline_rows(disaggregated())}
    assert rows["queue"].figure == "5.0 ms"
    assert rows["prefill"].figure == "20.0 ms"
    assert rows["prefill"].note == "40 tokens, 2000 tokens/s on prefill-0"
    assert rows["transfer"].figure == "5.0 ms"
    assert rows["transfer"].note == "2.50 MB in 3 pages by UCX, overlaps prefill, 4.0 ms of it after"
    assert rows["first token"].figure == "27.0 ms"
    assert rows["hand-over"].figure == "6.0 ms"
    assert rows["inter-token"].figure == "10.0 ms"
    assert rows["rate"].figure == "100.0 tokens/s"
    assert rows["total"].figure == "127.0 ms"
    shown = text(timeline_table(disaggregated()))
    assert all(name in shown for name in rows)


def test_a_placement_has_a_row() -> None:
    placement = PlacementStats(16, 8, 16, PromptCost(16, 8, 16, 0.0, 0.002, 0.018), 0.022, 0.001)
    answer = answer_of(replace(disaggregated().timeline, placement=placement), 40, 11)
    row = {row.name: row for row in timeline_rows(answer)}["predicted"]
    assert row.figure == "20.0 ms"
    assert row.note == (
        "from placement to first token, took 22.0 ms; prompt tokens: 16 resident, 8 reloaded, 16 computed;"
        " regret 1.0 ms"
    )


def test_a_transfer_after_prefill_has_a_rate_and_long_times_are_seconds() -> None:
    event_times = stamps(RECEIVED=0, PREFILL_FINISHED=25, TRANSFER_STARTED=26, TRANSFER_FINISHED=31, FINISHED=12_345)
    timeline = Timeline(event_times, TransferStats(2_500_000, 3, "UCX", 5 * MS), "prefill-0", "decode-0")
    rows = {row.name: row for row in timeline_rows(answer_of(timeline, 40, 11))}
    assert rows["transfer"].note == "2.50 MB in 3 pages by UCX, 0.50 GB/s"
    assert rows["total"].figure == "12.3 s"


def test_what_did_not_happen_is_a_dash() -> None:
    timeline = Timeline(stamps(RECEIVED=0, FIRST_TOKEN=9, FINISHED=9), None, "", "")
    rows = {row.name: row for row in timeline_rows(answer_of(timeline, 3, 1))}
    assert rows["queue"].figure == "9.0 ms"
    assert "stall" not in rows
    assert {rows[name].figure for name in ("prefill", "transfer", "hand-over", "inter-token", "rate")} == {"-"}
    assert rows["transfer"].note == "no KV moved"
    assert rows["first token"].figure == "9.0 ms"


def test_status() -> None:
    started = int(datetime(2026, 3, 1, 12).timestamp() * 1e9) + 7
    worker = inference_pb2.WorkerStatus(
        worker_id="decode-0", role="decode", incarnation=17, connected=True, requests=2, pages_used=3,
        started_unix_nanos=started, pages_total=9, transport="UCX (cma)", device="cpu", step_policy="chunked 512",
    )  # fmt: skip
    view = ServerView(
        inference_pb2.GetServerInfoResponse(version="0.1.0", workers=[worker], mode="adaptive"),
        inference_pb2.GetLoadsResponse(waiting=4, running=2),
        inference_pb2.GetModelInfoResponse(model="m", dtype="float32", max_context=2048, summary=["8.03 B parameters"]),
    )
    shown = text(worker_table(view))
    for word in ("decode-0", "2026-03-01 12:00:00", "connected", "3 / 9", "UCX (cma)", "cpu", "chunked 512"):
        assert word in shown
    assert "KV tiers" not in shown
    worker.kv_tiers.extend(["host 64 GiB", "disk 500 GiB"])
    view.info.workers[0].CopyFrom(worker)
    assert "host 64 GiB, disk 500 GiB" in text(worker_table(view))
    line = summary("127.0.0.1:5", view)
    assert "adaptive, 2 running, 4 waiting" in line
    assert "float32, context 2048" in line
    assert line.endswith("\n  8.03 B parameters")


def test_what_somebody_should_look_at_is_said_in_whole_sentences() -> None:
    workers = [
        inference_pb2.WorkerStatus(worker_id="prefill-0", role="prefill", connected=True, warnings=["slow; do this"]),
        inference_pb2.WorkerStatus(worker_id="decode-1", role="decode", not_ready="gone"),
        inference_pb2.WorkerStatus(worker_id="decode-0", role="decode", connected=True, not_ready="8 of 9 are lost"),
    ]
    view = ServerView(
        inference_pb2.GetServerInfoResponse(workers=workers, degraded="no prefill worker is serving now"),
        inference_pb2.GetLoadsResponse(),
        inference_pb2.GetModelInfoResponse(),
    )
    assert remarks(view) == [
        "degraded: no prefill worker is serving now",
        "decode-0 is not ready: 8 of 9 are lost",
        "decode-1 is not ready: gone",
        "prefill-0: slow; do this",
    ]
    rows = text(worker_table(view)).splitlines()[1:]
    assert [[state for state in ("connected", "not ready", "unreachable") if state in row] for row in rows] == [
        ["not ready"],
        ["unreachable"],
        ["connected"],
    ]


def test_status_names_workers_that_do_not_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def absent(_client: ControllerClient) -> tuple[Absence, ...]:
        return (Absence("decode-1", "waiting for a node with free capacity", coming=True),)

    monkeypatch.setenv(state.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(ControllerClient, "absent", absent)
    state.announce("127.0.0.1:1", "", "m", "127.0.0.1:2", "secret")
    assert absences("") == ["decode-1 does not serve: waiting for a node with free capacity"]
    assert absences("elsewhere:1") == [], "its controller is not the one that is known here"


@pytest.mark.skipif(shutil.which("awk") is None, reason="awk is not installed")
def test_the_guides_loop_over_workers_takes_each_that_serves_once() -> None:
    workers = [
        inference_pb2.WorkerStatus(worker_id="decode-0", role="decode", connected=True, not_ready="8 of 9 are lost"),
        inference_pb2.WorkerStatus(worker_id="both-1", role="both", connected=True, step_policy="chunked 512"),
    ]
    info = inference_pb2.GetServerInfoResponse(workers=workers)
    view = ServerView(info, inference_pb2.GetLoadsResponse(), inference_pb2.GetModelInfoResponse())
    status = [
        summary("127.0.0.1:5", view),
        text(worker_table(view)),
        *remarks(view),
        "decode-2 does not serve: drained",
    ]
    match = re.search(r"awk '([^']+)'", (ROOT / "docs" / "operations" / "scale.md").read_text())
    assert match
    program = match[1].replace("\\|", "|")
    done = subprocess.run(["awk", program], input="\n".join(status), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["both-1", "decode-0"]


def test_workers_that_leave_or_change_roles_are_marked() -> None:
    workers = [
        inference_pb2.WorkerStatus(worker_id="a", connected=True, draining=True, closing="both"),
        inference_pb2.WorkerStatus(worker_id="b", connected=True, closing="decode"),
        inference_pb2.WorkerStatus(worker_id="c", draining=True),
    ]
    info = inference_pb2.GetServerInfoResponse(workers=workers)
    view = ServerView(info, inference_pb2.GetLoadsResponse(), inference_pb2.GetModelInfoResponse())
    rows = text(worker_table(view)).splitlines()[1:]
    assert [[state for state in ("draining", "closing decode", "unreachable") if state in row] for row in rows] == [
        ["draining"],
        ["closing decode"],
        ["unreachable"],
    ]


def test_workers_stand_by_role_and_number() -> None:
    names = ["prefill-1", "decode-10", "prefill-0", "decode-9"]
    workers = [inference_pb2.WorkerStatus(worker_id=name, role=name.partition("-")[0]) for name in names]
    view = ServerView(
        inference_pb2.GetServerInfoResponse(workers=workers),
        inference_pb2.GetLoadsResponse(),
        inference_pb2.GetModelInfoResponse(),
    )
    shown = text(worker_table(view)).split()
    assert [word for word in shown if word in names] == ["decode-9", "decode-10", "prefill-0", "prefill-1"]
