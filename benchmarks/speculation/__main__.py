"""Runs `python -m benchmarks.speculation`, see `speed.py`."""

from benchmarks.command_line import run_case

if __name__ == "__main__":
    run_case("speculation", __doc__, {"speed": "benchmarks.speculation.speed"})
