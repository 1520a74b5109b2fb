"""Measures the cost of serving beyond the engine: `python -m benchmarks.serving [cluster|steps|prefixes]`.

`cluster` compares a whole cluster with its own engine, `steps` measures the host's work per step, and `prefixes` what
common prefixes of prompts save. The last line is one JSON object.
"""

from benchmarks.command_line import run_case

CASES = {
    "cluster": "benchmarks.serving.whole_cluster",
    "steps": "benchmarks.serving.step_overhead",
    "prefixes": "benchmarks.serving.prefixes",
}

if __name__ == "__main__":
    run_case("serving", __doc__, CASES)
