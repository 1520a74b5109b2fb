"""Writes docs/performance.md from the newest runs in benchmarks/results/: `python -m benchmarks.tables`.

It also checks these runs against their floors (`floors.py`); the exit status is 1 if one misses a floor.

Each section shows the key figures of its benchmark's newest run for each model and hardware. All other figures of a run
are in its file; earlier runs are in git.
"""

import sys
from pathlib import Path

from benchmarks.floors import check
from benchmarks.results import RESULTS
from benchmarks.sections import engine, served, strategies

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
_HEAD = """# Performance

The newest run for each model and hardware. `python -m benchmarks.tables` makes this page from the files in
[benchmarks/results](../benchmarks/results), which name command, commit, hardware and versions of each run and hold all
of its figures, checks whether the newest runs hold the floors that are set for them, and fails if one does not. Earlier
runs are in git.

**Method.** A share is a ratio to a ceiling measured in the same run: for decode, the bytes that a step must read (all
weights, the KV cache of its requests) per second, over the rate of a device copy; for prefill, the floating-point
operations of the prompt per second, over the rate of an 8,192³ product. Weights are random, which changes no step's
time. TTFT is the time from sending a request to its first token, ITL the time between two tokens of an answer, both on
the client's clock. Loads are open: a request leaves when it is due, whether or not earlier ones have been answered.
Goodput is the highest number of requests per second within the targets of a service class, among loads of which 90 %
are. Targets are for TTFT and for the 99th percentile of a request's own ITL: strict 2 s and two idle decode steps,
balanced 1 s and 25 ms, quick 300 ms and 60 ms.
"""


def main() -> int:
    """Write the page, check the floors, and return the exit status."""
    PAGE.write_text(make_page(RESULTS), encoding="utf-8")
    print("wrote", PAGE.name)
    return check(RESULTS)


def make_page(folder: Path) -> str:
    """Return the page about the runs in `folder`. Raises LookupError if a section has no run there."""
    sections = (
        *(engine.engine, engine.by_batch, engine.chunks, engine.quantized, engine.experts, engine.latent),
        *(engine.attention_forms, engine.tile_order),
        *(served.served, served.handoff, served.prefixes),
        *(strategies.goodput, strategies.strategies, strategies.batching, strategies.planning),
        *(served.peer, served.router, served.cpu),
    )
    return _HEAD + "".join(section(folder) for section in sections)


if __name__ == "__main__":
    sys.exit(main())
