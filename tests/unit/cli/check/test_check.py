"""`tandem check` against a small server that is sound, and against one with each defect that the checks look for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tandem.cli.check.answer import Agreement, Answer, Token, compare
from tandem.cli.check.checks import CHECKS
from tandem.cli.main import app
from tests.unit.cli.check.defective_server import Defect, defective_server, tokens_of

SMALL = (
    *("--rounds", "1", "--repeats", "12", "--concurrency", "8", "--prompt-words", "8"),
    *("--answer-tokens", "6", "--settle", "0.3", "--recovery", "0.5"),
)


def run_check(url: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["check", "--url", url, *SMALL, *options])


def report(defect: Defect, folder: Path, *options: str) -> dict[str, dict[str, Any]]:
    """Returns the rows of a report by the names of the checks."""
    with defective_server(defect, folder) as (url, server):
        command = ("--restart-command", server.restart_command)
        run = run_check(url, *command, "--json", str(folder / "report.json"), *options)
        assert run.exit_code in (0, 1), (run.output, run.exception)
    rows = {row["check"]: row for row in json.loads((folder / "report.json").read_text())["checks"]}
    assert run.exit_code == any(row["result"] == "fail" for row in rows.values()), run.output
    return rows


def test_a_sound_server_passes_every_check(tmp_path: Path) -> None:
    rows = report(Defect.NONE, tmp_path)
    assert list(rows) == [*CHECKS, "restart"]
    assert {row["result"] for row in rows.values()} == {"ok"}, rows
    assert "left" in rows["aborts"]["found"]
    assert "left" in rows["deadlines"]["found"]
    assert "12 right; one answer" in rows["same-prompt"]["found"]
    assert "all clients have right answers" in rows["restart"]["found"]
    assert rows["usage"]["reproducer"].endswith("--only usage --seed 0")


@pytest.mark.parametrize(
    ("check", "defect", "reason"),
    [
        ("aborts", Defect.LEAKED_REQUESTS, "requests remain 0.3 s after their clients have left"),
        ("aborts", Defect.ABORTED_NEIGHBOURS, "sent alone, the request is answered"),
        ("aborts", Defect.NO_DONE, "the stream ended without [DONE]"),
        ("reused-pages", Defect.STALE_PAGES, "sent alone, the request is answered"),
        ("reused-pages", Defect.UNWRITTEN_PREFIX, "sent alone, the request is answered"),
        ("duplicate-ids", Defect.SHARED_IDS, "sent alone, the request is answered"),
        ("slow-readers", Defect.ONE_SENDER, "it did not end within 2 s"),
        ("slow-readers", Defect.CUT_SLOW_READERS, "sent alone, the request is answered"),
        ("deadlines", Defect.LEAKED_REQUESTS, "requests remain"),
        ("same-prompt", Defect.UNSTABLE, "sent alone, the request is answered"),
        ("usage", Defect.MISCOUNTED_ANSWER, "completion_tokens is 7, and 6 tokens were sent"),
        ("usage", Defect.MISCOUNTED_PROMPT, "the prompt has"),
        ("restart", Defect.TRUNCATED_AT_RESTART, "sent alone, the request is answered"),
        ("restart", Defect.DEAD_AFTER_RESTART, "no right answer within 0.5 s"),
    ],
)
def test_each_defect_is_found(check: str, defect: Defect, reason: str, tmp_path: Path) -> None:
    timeout = "2" if defect is Defect.ONE_SENDER else "60"
    row = report(defect, tmp_path, "--only", check, "--timeout", timeout)[check]
    assert row["result"] == "fail"
    assert any(reason in problem["reason"] for problem in row["problems"]), row


@pytest.mark.parametrize(
    ("check", "defect", "found"),
    [
        ("duplicate-ids", Defect.REFUSED_IDS, "refused"),
        ("restart", Defect.ERRORS_AT_RESTART, "cut off"),
        ("same-prompt", Defect.NEAR_TIES, "2 near ties, 12 right; 2 different answers"),
        ("same-prompt", Defect.NO_OPTIONS, "12 right; one answer"),
    ],
)
def test_what_a_server_may_do_is_no_failure(check: str, defect: Defect, found: str, tmp_path: Path) -> None:
    row = report(defect, tmp_path, "--only", check)[check]
    assert (row["result"], row["problems"]) == ("ok", []), row
    assert found in row["found"]


def test_near_ties_fail_without_a_tolerance(tmp_path: Path) -> None:
    row = report(Defect.NEAR_TIES, tmp_path, "--only", "same-prompt", "--tolerance", "0")["same-prompt"]
    assert row["result"] == "fail"


def test_the_script_of_a_failure_sends_the_same_requests(tmp_path: Path) -> None:
    """With curl, the defective server answers wrong again."""
    with defective_server(Defect.SHARED_IDS, tmp_path) as (url, server):
        run = run_check(url, "--only", "duplicate-ids", "--scripts", str(tmp_path / "scripts"))
        script = tmp_path / "scripts" / "duplicate-ids.sh"
        assert str(script) in run.output.replace("\n", "")
        sent = len(server.ids_in_use), server.answers
        server.last_of_id.clear()
        done = subprocess.run([script], capture_output=True, text=True, timeout=60, check=True)
    answers = done.stdout.count("[DONE]")
    assert (answers, server.answers - sent[1]) == (9, 9)
    prompts = {line.split('"prompt": "')[1].split('"')[0] for line in script.read_text().splitlines() if "curl" in line}
    firsts = [tokens_of(prompt, 1)[0] for prompt in prompts]
    assert len(prompts) == 8
    assert sum(f'"text": "{first}"' in done.stdout for first in firsts) == 1, "all of them have the answer of one"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--only", "none"), 2, "--only: 'none' is not a check; choose from aborts, "),
        (("--only", "restart"), 2, "--restart-command: is missing"),
        (("--only", "restart", "--restart-command", "exit 3"), 2, "--restart-command: 'exit 3' ended with exit code 3"),
        (("--json", "no/such/file"), 2, "--json: no/such is no folder"),
        (("--pair", "http://a/v1", "http://b/v1"), 2, "--pair: is given together with --url"),
        (("--url", "http://127.0.0.1:9"), 4, "does not answer"),
    ],
)
def test_wrong_options_are_named(options: tuple[str, ...], code: int, message: str, tmp_path: Path) -> None:
    with defective_server(Defect.NONE, tmp_path) as (url, _):
        run = run_check(url, *options)
    assert run.exit_code == code, run.output
    assert message in run.output
    assert "Traceback" not in run.output


def test_a_server_with_other_load_is_not_checked(tmp_path: Path) -> None:
    with defective_server(Defect.NONE, tmp_path) as (url, server):
        server.inside = 3
        run = run_check(url)
    assert run.exit_code == 4
    assert "has 3 other requests; check a server without other load" in run.output


@pytest.mark.parametrize("defect", [Defect.NONE, Defect.REUSED_HAND_OVERS])
def test_a_pair_of_servers(defect: Defect, tmp_path: Path) -> None:
    with defective_server(defect, tmp_path) as (url, _):
        options = ("--pair", url, url, "--only", "hand-overs", "--only", "aborts", "--json", str(tmp_path / "report"))
        run = CliRunner().invoke(app, ["check", *SMALL, *options])
    assert run.exit_code == (defect is not Defect.NONE), run.output
    rows = {row["check"]: row for row in json.loads((tmp_path / "report").read_text())["checks"]}
    expected = "ok" if defect is Defect.NONE else "fail"
    assert rows["hand-overs"]["result"] == expected, run.output
    if defect is Defect.NONE:
        assert rows["aborts"]["result"] == "ok", run.output
        assert rows["hand-overs"]["reproducer"].startswith(f"tandem check --pair {url} {url} ")
    else:
        script = "\n".join(rows["hand-overs"]["problems"][0]["script"])
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        assert "do_remote_decode" in script


def test_a_pair_without_hand_overs_is_named(tmp_path: Path) -> None:
    with defective_server(Defect.NONE, tmp_path) as (url, server):
        server.hands_over = False
        run = CliRunner().invoke(app, ["check", *SMALL, "--pair", url, url])
    assert run.exit_code == 4
    assert "replies without kv_transfer_params; start it with a --kv-transfer-config" in run.output


def answer(text: str, *tokens: Token, left: bool = False) -> Answer:
    return Answer(text=text, tokens=list(tokens), left=left)


REFERENCE = answer(
    "ab cd ef",
    Token("ab", -0.1, {"ab": -0.1, "ax": -3.0}),
    Token(" cd", -0.7, {" cd": -0.7, " cx": -0.9}),
    # The end of the answer is nearly as likely as the last token.
    Token(" ef", -0.1, {" ef": -0.1, " ex": -0.4, "<|im_end|>": -0.5}),
)


@pytest.mark.parametrize(
    ("text", "left", "agreement"),
    [
        ("ab cd ef", False, Agreement.SAME),
        ("ab c", True, Agreement.SAME),
        ("ab c", False, Agreement.WRONG),
        ("ab cx any", False, Agreement.NEAR_TIE),
        ("ab cy any", False, Agreement.WRONG),
        ("ax cd ef", False, Agreement.WRONG),
        ("ab cd ef gh", False, Agreement.WRONG),
        ("ab", False, Agreement.WRONG),
        ("ab cd", False, Agreement.NEAR_TIE),
        ("", True, Agreement.SAME),
        ("", False, Agreement.WRONG),
    ],
)
def test_an_answer_may_differ_from_a_near_tie_on(text: str, left: bool, agreement: Agreement) -> None:
    assert compare(answer(text, left=left), REFERENCE, 0.5) is agreement


def test_without_log_probabilities_a_difference_is_not_explained() -> None:
    assert compare(answer("ax"), answer("ab"), 0.5) is Agreement.UNEXPLAINED
