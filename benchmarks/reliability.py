"""Writes docs/reliability.md from the newest run of `python -m tests.faults`: `python -m benchmarks.reliability`."""

from pathlib import Path

from benchmarks.results import RESULTS, Run, newest_result

PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
_HEAD = """# Reliability

**The promise.** Whatever dies, hangs or leaves, no answer is wrong, and none ends early as if it were complete. A \
request ends with its right answer, or with an error that says what to do. While at least one worker of each phase \
lives or is replaced within `--recovery-timeout`, the death of a worker fails no request: its streams continue \
elsewhere with the same tokens. A router's death fails the requests that it holds, and clients send them again; the \
controller's death fails none. No KV page stays taken. [Life of a request](life_of_a_request.md) says how, and \
[Failure drills](operations/troubleshooting.md#failure-drills) what an operator sees.

**How it is tested.** `python -m tests.faults --minutes 10` starts a cluster of real processes on the CPU, sends \
requests of every form, and kills or suspends one process after the other, with a seed that it prints. Each answer is \
compared with that of the undisturbed cluster. `tests/faults/` has further faults, with several nodes and hosts, at \
moments that no random choice would find. `tandem check` does the part of it that needs no access to the processes, \
against any server ([check a server](guides/check.md)).

## Faults, tries and outcomes

"""


def page(run: Run) -> str:
    """Return the page as Markdown, with the table of one run."""
    rows = [
        "| process | fault | tries | right answers | errors | wrong or without end | longest recovery |",
        "|---|---|---|---|---|---|---|",
    ]
    for fault in run["faults"]:
        answers = dict(fault["answers"])
        right, bad = answers.pop("right", 0), answers.pop("wrong", 0) + answers.pop("no end", 0)
        errors = ", ".join(f"{count} × {kind}" for kind, count in sorted(answers.items())) or "0"
        longest = f"{max(fault['recovery_s']):.1f} s" if fault["recovery_s"] else "—"
        rows.append(f"| {fault['part']} | {fault['act']} | {fault['tries']} | {right} | {errors} | {bad} | {longest} |")
    details = [f"- {fault['part']}, {fault['act']}: {detail}" for fault in run["faults"] for detail in fault["details"]]
    listed = "\n".join(["", "Answers that no fault allows:", "", *details, ""]) if details else ""
    tail = f"""{listed}
One run of {run["minutes"]:g} minutes with seed {run["seed"]}, of SmolLM2-135M-Instruct with {run["workers"]} prefill \
and {run["workers"]} decode workers. The recovery ends when the last of {run["clients"]} clients has a right answer to \
a request that was sent after the fault; it includes the time of that request. This page is made of the run's JSON by \
`python -m benchmarks.reliability`.
"""
    return _HEAD + "\n".join(rows) + "\n" + tail


if __name__ == "__main__":
    PAGE.write_text(page(newest_result(RESULTS, "faults")[1]), encoding="utf-8")
