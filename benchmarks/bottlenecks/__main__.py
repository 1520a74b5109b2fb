"""Is `tandem why` right? `python -m benchmarks.bottlenecks --device cuda --shape llama-3-8b`, or `--device cpu`.

A real cluster: one worker that does everything, or with `--workers 2` one of each role. Load after load, each built so
that one bottleneck binds, and amid it the figures and the diagnosis that `tandem why` would print. Ceilings are those that
the workers measured at their start; on a GPU they are compared with a longer measurement before it.

A GPU's wire and host are wide: `--narrow wire` makes workers go by TCP, `--narrow host` has steps that take longer to
launch than to run.

The last line is one JSON object. Ends with 1 if a bottleneck was misnamed.
"""

import sys


def main() -> None:
    """Measure, print, keep if asked to."""
    from benchmarks.bottlenecks.command import run

    if not run():
        sys.exit(1)


if __name__ == "__main__":
    main()
