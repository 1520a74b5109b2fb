"""Measures speculative decoding: `python -m benchmarks.speculation [speed|parts]`.

`speed` compares answers, or steps of a model with random weights, with and without draft tokens. `parts` shows where
the time of a step that verifies draft tokens goes. The last line is one JSON object.
"""

from benchmarks.command_line import run_case

if __name__ == "__main__":
    run_case("speculation", __doc__, {name: f"benchmarks.speculation.{name}" for name in ("speed", "parts")})
