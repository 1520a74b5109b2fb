"""The tables of docs/performance.md, made from the runs in benchmarks/results/: `python -m benchmarks.tables`.

One table a benchmark and model, one column a run; only ratios, and what a reader needs beside them, next to the floor
that a figure must hold. Then decode steps with and without CUDA graphs, and each fused kernel beside its parts, of the
newest run that has them.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.floors import Floors, floors_of
from benchmarks.results import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
_SHOWN = (
    "_ratio",
    "_share_",
    "_over_without_",
    "_over_quiet",
    "meeting_transfers",
    "handover_ms_",
    "exposed_of_prefill",
    "decode_step_ms",
    "efficiency",
    "start_seconds",
    "copy_gb_per_s",
    "load_gb_per_s",
    "matrix_tflops",
    "decode_ms_b",
    "decode_sampled_ms_b",
    "wall_",
    "walls_",
)
_WHOLE = ("tokens_per_s_on", "tokens_per_s_off", "ratio", "ratio_standard_error")
"""Shown too, by their whole names."""
_EAGER, _FUSED = "decode_eager_ms_b", "comparisons"
_ASIDE = ("tune", "fused", "profile")
"""Files of these benchmarks have no table of their own."""
_HEAD = """# Performance

Made by `python -m benchmarks.tables` from the runs in `benchmarks/results/`, which name command, commit, hardware and
versions. Ratios compare with ceilings or peers measured in the same run: `bw` to the bandwidth of a device copy,
`flops` to the rate of an 8192³ product, the others as their benchmark says. Where a figure has a floor to hold, the
runs that miss it say so.

`ratio` of `metrics` is decode tokens a second with metrics over those without; a run whose standard error is above its
floor says nothing about one percent.

`decode_idle_share` is the share of launched decode steps in which no kernel runs, from the gaps of a trace;
`decode_idle_between_steps_share` counts those between a step and the next alone. Runs without the latter inferred the
former as 1 − graph replay ÷ step, not below 0.

In tables of `kv`, figures of 8192 belong to prompts of 8,176 tokens: with their answers they fill a context of 8,192.
`_read`: the decode worker reads the pages; else the prefill worker writes them. A step meets a transfer while the
first pages of a prompt or those of its last chunk move. On a CPU the copy that `bw` is told by is a yardstick and no
bound: it is one process's between two large buffers, and transfers between pools have come out at up to 2.3 times of
it. Runs before 2026-11-22 04:15 measured prefill without transfers
after all with them, and the ceiling on a CPU with one size.
"""
_ONE_GPU = (
    "Both processes share the chip: decode steps wait for chunks of prompts, transfers or not, and a copy within its "
    "memory is the ceiling. What two GPUs must hold is no measure here.\n"
)

Run = dict[str, Any]


def main() -> None:
    """Write the page."""
    PAGE.write_text(make_page(RESULTS), encoding="utf-8")
    print("wrote", PAGE.name)


def make_page(folder: Path) -> str:
    """The page of the runs in `folder`."""
    groups: dict[str, list[Run]] = defaultdict(list)
    every: list[Run] = []
    for file in sorted(folder.glob("*.json")):
        run: Run = json.loads(file.read_text(encoding="utf-8"))
        every.append(run)
        if _shown(run) and not file.name.startswith(_ASIDE):
            groups[_title(file.name.split("-", 1)[0], run)].append(run)
    tables = [_table(title, runs) for title, runs in sorted(groups.items())]
    runs = sorted(every, key=lambda run: str(run.get("date")))
    tables += [
        make(run) for make, run in ((_graphs, _newest(runs, _EAGER + "1")), (_fused, _newest(runs, _FUSED))) if run
    ]
    return "\n".join([_HEAD, *tables]) + "\n"


def _title(benchmark: str, run: Run) -> str:
    hardware = run["hardware"]["name"]
    if run.get("gpus", 0) > 1:
        hardware = f"{run['gpus']} x {hardware}"
    return f"{benchmark}: {run.get('shape') or run['model']}, {hardware}, {run['dtype']}"


def _table(title: str, runs: list[Run]) -> str:
    """A column a run, oldest first, behind the floors where there are any."""
    runs = sorted(runs, key=lambda run: str(run["date"]))
    names = list(dict.fromkeys(name for run in runs for name in _shown(run)))
    floors = floors_of(title.split(":", 1)[0], runs[-1])
    commands = list(dict.fromkeys(str(run["command"]) for run in runs))
    heads = [_head(run, commands) for run in runs]
    rows = [[f"`{name}`", *(_judged(name, run, floors) for run in runs)] for name in names]
    if floors:
        heads.insert(0, "floor")
        for name, row in zip(names, rows, strict=True):
            row.insert(1, str(floors.get(name, "")))
    lines = [f"\n## {title}\n", *_commands(commands)]
    lines += [_ONE_GPU] if title.startswith("kv:") and runs[-1].get("gpus") == 1 else []
    lines += _verdict(names, runs[-1], floors)
    lines += [_line(["figure", *heads]), _line(["---"] * (len(heads) + 1))]
    return "\n".join([*lines, *map(_line, rows)])


def _head(run: Run, commands: list[str]) -> str:
    """Date and commit of a column, and the number of its command where there are several."""
    number = f"<br>({commands.index(run['command']) + 1})" if len(commands) > 1 else ""
    return f"{str(run['date'])[:16].replace('T', ' ')}<br>{str(run['commit'])[:8]}{number}"


def _commands(commands: list[str]) -> list[str]:
    if len(commands) == 1:
        return [f"`{commands[0]}`\n"]
    return [*(f"{number}. `{command}`" for number, command in enumerate(commands, start=1)), ""]


def _misses(name: str, run: Run, floors: Floors) -> bool:
    return name in floors and floors[name].missed(run.get(name), run)


def _verdict(names: list[str], run: Run, floors: Floors) -> list[str]:
    """One sentence about the newest run."""
    if not floors:
        return []
    missed = [f"`{name}`" for name in names if _misses(name, run, floors)]
    lacking = [f"`{name}`" for name in floors if name not in run]
    said = f"misses the floor of {', '.join(missed)}" if missed else "holds every floor"
    if lacking:
        said += f", and lacks {', '.join(lacking)}, of which a floor is set"
    return [f"The newest run {said}.\n"]


def _judged(name: str, run: Run, floors: Floors) -> str:
    return _cell(run.get(name)) + (" (missed)" if _misses(name, run, floors) else "")


def _newest(runs: list[Run], figure: str) -> Run | None:
    return next((run for run in reversed(runs) if figure in run), None)


def _graphs(run: Run) -> str:
    """Milliseconds of decode steps with and without CUDA graphs, by batch."""
    batches = [name.removeprefix(_EAGER) for name in run if name.startswith(_EAGER)]
    lines = [
        f"\n## CUDA graphs: {run['shape']}, {run['hardware']['name']}, {run['dtype']}, {str(run['commit'])[:8]}\n",
        f"`{run['command']}`\n",
        _line(["decode step, batch", "ms with graphs", "ms without", "ratio"]),
        _line(["---"] * 4),
    ]
    for batch in batches:
        replayed, eager = run[f"decode_ms_b{batch}"], run[f"{_EAGER}{batch}"]
        lines.append(_line([batch, _cell(replayed), _cell(eager), _cell(eager / replayed)]))
    return "\n".join(lines)


def _fused(run: Run) -> str:
    """Microseconds of every fused kernel beside its parts, by tokens of the step."""
    lines = [
        f"\n## Fused kernels: {run['shape']}, {run['hardware']['name']}, {run['dtype']}, {str(run['commit'])[:8]}\n",
        f"`{run['command']}`\n",
        _line(["operation", "tokens", "fused us", "in parts us", "ratio"]),
        _line(["---"] * 5),
    ]
    for each in run[_FUSED]:
        figures = (each["fused_us"], each["unfused_us"], each["ratio"])
        lines.append(_line([each["operation"], str(each["tokens"]), *map(_cell, figures)]))
    return "\n".join(lines)


def _shown(run: Run) -> list[str]:
    def shown(name: str) -> bool:
        return name in _WHOLE or any(part in name for part in _SHOWN)

    return [name for name in run if shown(name) and not isinstance(run[name], dict | list)]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
