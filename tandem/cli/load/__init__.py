"""Open-loop load by gRPC and HTTP: each request is sent when it is due, whatever became of earlier ones.

`run_load` (run.py) loads a router; `tandem bench` and `python -m benchmarks.load` load any server (`tandem/cli/bench`).
"""
