"""Measures the engine alone: `python -m benchmarks.engine [speed|adapters|weights]`.

`speed` compares steps with transformers or with a GPU's ceilings, `adapters` compares steps with and without LoRA, and
`weights` measures the loading of a checkpoint. The last line is one JSON object.
"""

from benchmarks.command_line import run_case

CASES = {
    "speed": "benchmarks.engine.speed",
    "adapters": "benchmarks.engine.adapters",
    "weights": "benchmarks.engine.weights",
}

if __name__ == "__main__":
    run_case("engine", __doc__, CASES)
