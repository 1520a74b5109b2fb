"""Open-loop load over gRPC and HTTP: each request is sent at its due time, even if earlier ones have not ended.

`run_load` (run.py) loads a router; `tandem bench` and `python -m benchmarks.load` load any server (`tandem/cli/bench`).
"""
