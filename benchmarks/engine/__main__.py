"""Measures the engine alone: `python -m benchmarks.engine [speed|chunks|adapters|ranks|weights]`.

`speed` compares steps with transformers or with a GPU's ceilings, `chunks` measures steps with a chunk of a prompt
beside answers, `adapters` compares steps with and without LoRA, `ranks` compares several GPUs with one, and `weights`
measures the loading of a checkpoint. The last line is one JSON object.
"""

from benchmarks.command_line import run_case

CASES = {
    "speed": "benchmarks.engine.speed",
    "chunks": "benchmarks.engine.chunk_steps",
    "adapters": "benchmarks.engine.adapters",
    "ranks": "benchmarks.engine.ranks",
    "weights": "benchmarks.engine.weights",
}

if __name__ == "__main__":
    run_case("engine", __doc__, CASES)
