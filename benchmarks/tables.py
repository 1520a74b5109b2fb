"""The tables of docs/performance.md, made from the runs in benchmarks/results/: `python -m benchmarks.tables`.

One table a benchmark and model, one column a run; only ratios, and what a reader needs beside them. Then decode steps
with and without CUDA graphs, and each fused kernel beside its parts, of the newest run that has them.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
_SHOWN = (
    "_ratio",
    "_share_",
    "_over_without_",
    "handover_ms_",
    "exposed_of_prefill",
    "decode_step_ms",
    "efficiency",
    "start_seconds",
    "copy_gb_per_s",
    "load_gb_per_s",
    "matrix_tflops",
    "decode_ms_b",
)
_EAGER, _FUSED = "decode_eager_ms_b", "comparisons"
_HEAD = """# Performance

Made by `python -m benchmarks.tables` from the runs in `benchmarks/results/`, which name command, commit, hardware and
versions. Ratios compare with ceilings or peers measured in the same run: `bw` to the bandwidth of a device copy,
`flops` to the rate of an 8192³ product, the others as their benchmark says.
"""

Run = dict[str, Any]


def main() -> None:
    """Write the page."""
    groups: dict[str, list[Run]] = defaultdict(list)
    every: list[Run] = []
    for file in sorted(RESULTS.glob("*.json")):
        run: Run = json.loads(file.read_text(encoding="utf-8"))
        every.append(run)
        if _shown(run) and not file.name.startswith(("tune", "fused")):
            groups[_title(file.name.split("-", 1)[0], run)].append(run)
    tables = [_table(title, runs) for title, runs in sorted(groups.items())]
    runs = sorted(every, key=lambda run: str(run.get("date")))
    tables += [
        make(run) for make, run in ((_graphs, _newest(runs, _EAGER + "1")), (_fused, _newest(runs, _FUSED))) if run
    ]
    PAGE.write_text("\n".join([_HEAD, *tables]))
    print("wrote", PAGE.name)


def _title(benchmark: str, run: Run) -> str:
    hardware = run["hardware"]["name"]
    if run.get("gpus", 0) > 1:
        hardware = f"{run['gpus']} x {hardware}"
    return f"{benchmark}: {run.get('shape') or run['model']}, {hardware}, {run['dtype']}"


def _table(title: str, runs: list[Run]) -> str:
    """A column a run, oldest first."""
    runs = sorted(runs, key=lambda run: str(run["date"]))
    names = list(dict.fromkeys(name for run in runs for name in _shown(run)))
    heads = [f"{str(run['date'])[:16].replace('T', ' ')}<br>{str(run['commit'])[:8]}" for run in runs]
    lines = [
        f"\n## {title}\n",
        f"`{runs[-1]['command']}`\n",
        _line(["figure", *heads]),
        _line(["---"] * (len(runs) + 1)),
    ]
    return "\n".join([*lines, *(_line([f"`{name}`", *(_cell(run.get(name)) for run in runs)]) for name in names)])


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
    return [name for name in run if any(part in name for part in _SHOWN) and not isinstance(run[name], dict | list)]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
