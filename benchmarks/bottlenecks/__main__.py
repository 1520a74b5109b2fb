"""Checks `tandem why`: `python -m benchmarks.bottlenecks --device cuda --shape llama-3-8b`, or `--device cpu`.

Starts a real cluster: one worker of both roles, or with `--workers 2` one of each role. Each load is built to have one
bottleneck; during it the figures and the diagnosis are those that `tandem why` would print. Ceilings are measured by
the workers at their start; on a GPU they are compared with a longer measurement before it.

A GPU's transport and host are rarely bottlenecks: `--narrow wire` makes workers use TCP, and `--narrow host` has steps
that take longer to launch than to run.

The last line is one JSON object. The exit status is 1 if a diagnosis was wrong.
"""

import sys


def main() -> None:
    """Runs the measurement, prints it, and saves it with --save."""
    from benchmarks.bottlenecks.command import run

    if not run():
        sys.exit(1)


if __name__ == "__main__":
    main()
