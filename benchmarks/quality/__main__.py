"""Measures what quantization or another dtype changes: `python -m benchmarks.quality MODEL --candidate OUTPUT`.

`python -m benchmarks.quality [predictions] MODEL` compares predictions with those of the same model in 16 or 32 bits.
`python -m benchmarks.quality retrieval` retrieves numbers from long texts with a model made for that task, over 16-bit
and 8-bit KV. The last line is one JSON object.
"""

from benchmarks.command_line import run_case

CASES = {"predictions": "benchmarks.quality.predictions", "retrieval": "benchmarks.quality.retrieval"}

if __name__ == "__main__":
    run_case("quality", __doc__, CASES)
