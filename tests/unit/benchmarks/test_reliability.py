"""docs/reliability.md is made of the kept run, and shows the answers that no fault allows."""

from __future__ import annotations

from typing import Any

from benchmarks.reliability import PAGE, page
from benchmarks.results import RESULTS, newest_result


def test_the_page_is_made_of_the_newest_run() -> None:
    made = page(newest_result(RESULTS, "faults")[1])
    assert PAGE.read_text(encoding="utf-8") == made, "run `python -m benchmarks.reliability`"


def test_wrong_answers_and_errors_are_shown() -> None:
    answers = {"right": 40, "wrong": 2, "no end": 1, "HTTP 503": 4, "ReadError": 3}
    fault: dict[str, Any] = {"part": "router", "act": "SIGKILL", "tries": 2, "answers": answers, "recovery_s": [1.5, 3]}
    fault["details"] = ["greedy: no end"]
    untried: dict[str, Any] = {"part": "decode", "act": "SIGKILL", "tries": 0, "answers": {}, "recovery_s": []}
    untried["details"] = []
    made = page({"minutes": 1, "seed": 5, "workers": 2, "clients": 10, "faults": [fault, untried]})
    assert "| router | SIGKILL | 2 | 40 | 4 × HTTP 503, 3 × ReadError | 3 | 3.0 s |" in made
    assert "| decode | SIGKILL | 0 | 0 | 0 | 0 | — |" in made
    assert "- router, SIGKILL: greedy: no end" in made
