"""Open-loop load through a cluster's router: each request is sent when it is due, whatever became of earlier ones.

`run_load` (run.py) is the entry point; `python -m benchmarks.load` is its command.
"""
