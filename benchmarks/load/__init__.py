"""Open-loop load through a cluster's front door: requests leave when they are due, whatever became of those before.

`run_load` (run.py) is the way in; `python -m benchmarks.load` is its command.
"""
