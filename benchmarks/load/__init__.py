"""Open-loop load on a cluster that the benchmark may start, from drawn requests or traces up to the knee.

The clients are those of `tandem bench` (`tandem/cli/load/`); `python -m benchmarks.load` is the command.
"""
