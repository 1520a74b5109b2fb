"""Writes docs/reliability.md from the newest run of `python -m tests.faults`: `python -m benchmarks.reliability`."""

from pathlib import Path

from benchmarks.results import RESULTS, Run, newest_result

PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
_HEAD = """# Reliability

**The promise.** Whatever dies, hangs or leaves, no answer is wrong, and none ends early as if it were complete. A \
request ends with its right answer, or with an error that says what to do. While at least one worker of each phase \
lives or is replaced within `--recovery-timeout`, the death of a worker fails no request: its streams continue \
elsewhere with the same tokens. A router's death fails the requests that it holds, and clients send them again; the \
controller's death fails none. No KV page stays taken. Not yet kept when faults are dense: while the only decode \
worker has too many pages in quarantine, or a phase has no worker that the router expects back, requests get 503. \
[Life of a request](life_of_a_request.md) says how, and \
[Failure drills](operations/troubleshooting.md#failure-drills) what an operator sees.

**How it is tested.** `python -m tests.faults --minutes 10` starts a cluster of real processes on the CPU, sends \
requests of every form, and strikes one part after the other and several at once, with a seed that it prints. Each \
answer is compared with that of the undisturbed cluster. An answer that differs is right only if rounding explains \
each of its tokens: another step may have another composition, and then logits of float32 differ by some 2e-5, so that \
a seeded draw or a greedy choice which lies that near to another token may become that one. Such answers are counted \
apart, as near ties. `--cluster hybrid` and `--cluster ranks` disturb a model with state layers and workers of two \
ranks, and `--faults` chooses some of the faults. `tests/faults/` has further faults, with several nodes and hosts, at \
moments that no random choice would find. `tandem check` does the part of it that needs no access to the processes, \
against any server ([check a server](guides/check.md)).

## Faults, tries and outcomes

"""


def page(run: Run) -> str:
    """Return the page as Markdown, with the table of one run."""
    rows = [
        "| part | fault | tries | right answers | of them near ties | errors | wrong or without end | longest gap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for fault in run["faults"]:
        answers = dict(fault["answers"])
        near_ties, bad = answers.pop("near tie", 0), answers.pop("wrong", 0) + answers.pop("no end", 0)
        right = sum(answers.pop(kind, 0) for kind in ("right", "left", "deadline")) + near_ties
        errors = ", ".join(f"{count} × {kind}" for kind, count in sorted(answers.items())) or "0"
        gap = f"{fault['longest_gap_s']:.1f} s" if fault["longest_gap_s"] else "—"
        fails = " *" if fault["may_cause"] else ""
        what = f"{fault['part']} | {fault['act']}{fails}" if fault["part"] else "— | none"
        rows.append(f"| {what} | {fault['tries'] or '—'} | {right} | {near_ties} | {errors} | {bad} | {gap} |")
    details = [f"- {fault['fault']}: {detail}" for fault in run["faults"] for detail in fault["details"]]
    listed = "\n".join(["", "Answers that no fault allows:", "", *details, ""]) if details else ""
    tries = sum(fault["tries"] for fault in run["faults"])
    tail = f"""{listed}
{tries} faults in one run of {run["minutes"]:g} minutes with seed {run["seed"]}, of {run["model"]} with \
{run["workers"]} prefill and {run["workers"]} decode workers, {run["clients"]} clients and at most \
{run["max_attempts"]} attempts of a request. {run["ended_well"]:,} requests ended well, and {run["not_saved"]:,} \
failed with an error that the fault may not cause. A right answer counts for each fault during it, an error for its \
likeliest cause. Answers to clients that left and of requests whose deadline passed were right as far as they came. A \
fault with * may fail requests that it interrupts: those whose connection it ends, or whose step. The longest gap is \
that between two tokens of a stream. This page is made of the run's JSON by `python -m benchmarks.reliability`.
"""
    return _HEAD + "\n".join(rows) + "\n" + tail


if __name__ == "__main__":
    PAGE.write_text(page(newest_result(RESULTS, "faults")[1]), encoding="utf-8")
