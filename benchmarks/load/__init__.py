"""Open-loop load through a cluster's router: requests leave when they are due, whatever became of those before.

`run_load` (run.py) is the way in; `python -m benchmarks.load` is its command.
"""
