"""Measures what tiers of the prefix cache save: `python -m benchmarks.kv_tiers [simulated|served|reload]`.

`simulated` runs the routers and workers of a cluster under a virtual clock, `served` loads a cluster or any other
server, and `reload` measures how fast a worker loads pages from host memory. The last line is one JSON object.
"""

from benchmarks.command_line import run_case

CASES = {
    "simulated": "benchmarks.kv_tiers.simulated",
    "served": "benchmarks.kv_tiers.served",
    "reload": "benchmarks.kv_tiers.reload",
}

if __name__ == "__main__":
    run_case("kv_tiers", __doc__, CASES)
