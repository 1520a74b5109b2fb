"""Measures the router alone: `python -m benchmarks.router [streams|placement]`.

`streams` measures the messages and tokens that a router forwards between a stand-in worker and clients, `placement` the
time to choose workers for a request. The last line is one JSON object.
"""

from benchmarks.command_line import run_case

CASES = {
    "streams": "benchmarks.router.streams",
    "placement": "benchmarks.router.placement",
    "retention": "benchmarks.router.retention",
    "sessions": "benchmarks.router.sessions",
}

if __name__ == "__main__":
    run_case("router", __doc__, CASES)
