"""Open-loop load by gRPC and HTTP: each request is sent when it is due, whatever became of earlier ones.

`run_load` (run.py) is the entry point for a router; `tandem bench` and `python -m benchmarks.load` are the commands.
"""
