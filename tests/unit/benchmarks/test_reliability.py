"""docs/reliability.md is made of the kept run, and shows the answers that no fault allows."""

from __future__ import annotations

from typing import Any

from benchmarks.reliability import PAGE, page
from benchmarks.results import RESULTS, newest_result


def test_the_page_is_made_of_the_newest_run() -> None:
    made = page(newest_result(RESULTS, "faults")[1])
    assert PAGE.read_text(encoding="utf-8") == made, "run `python -m benchmarks.reliability`"


def test_wrong_answers_and_errors_are_shown() -> None:
    answers = {"right": 40, "near tie": 1, "left": 2, "wrong": 2, "no end": 1, "HTTP 503": 4, "ReadError": 3}
    untried: dict[str, Any] = {"fault": "kill-decode", "part": "decode", "act": "SIGKILL", "may_cause": []}
    untried |= {"tries": 0, "answers": {}, "longest_gap_s": 0.0, "details": []}
    tried = untried | {
        "fault": "kill-router",
        "part": "router",
        "may_cause": ["ReadError"],
        "tries": 2,
        "answers": answers,
    }
    tried |= {"longest_gap_s": 3.04, "details": ["greedy: no end"]}
    run = {
        "minutes": 1,
        "seed": 5,
        "workers": 2,
        "clients": 10,
        "max_attempts": 3,
        "model": "m",
        "ended_well": 43,
        "not_saved": 0,
    }
    made = page(run | {"faults": [tried, untried]})
    assert "| router | SIGKILL * | 2 | 43 | 1 | 4 × HTTP 503, 3 × ReadError | 3 | 3.0 s |" in made
    assert "| decode | SIGKILL | — | 0 | 0 | 0 | 0 | — |" in made
    assert "- kill-router: greedy: no end" in made
    assert "2 faults in one run of 1 minutes" in made
