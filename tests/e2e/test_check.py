"""`tandem check` against a running cluster, of which a worker is killed in the check of a restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tandem.cli.check.checks import CHECKS
from tandem.cli.main import app


def test_a_cluster_passes_every_check(running_cluster: Callable[..., Any], tmp_path: Path) -> None:
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    victim = cluster.worker("decode")
    options = (
        *(
            "--url",
            f"http://{cluster.http_address.removeprefix('http://')}/v1",
            "--rounds",
            "1",
            "--repeats",
            "20",
            "--concurrency",
            "4",
        ),
        *("--prompt-words", "16", "--answer-tokens", "8", "--timeout", "300", "--settle", "60"),
        *("--restart-command", f"kill -9 {victim.pid}", "--json", str(tmp_path / "report.json")),
    )
    run = CliRunner().invoke(app, ["check", *options])
    assert run.exit_code == 0, (run.output, run.exception)
    rows = {row["check"]: row for row in json.loads((tmp_path / "report.json").read_text())["checks"]}
    assert list(rows) == [*CHECKS, "restart"]
    assert {row["result"] for row in rows.values()} == {"ok"}, rows
    assert not any("no metrics say" in row["found"] for row in rows.values()), rows
    cluster.assert_idle_and_sound()
