"""Compares static, dynamic and continuous batching under a virtual clock: `python -m benchmarks.batching [--save]`.

One worker has `--slots` places in its decode batch. With static batching a batch begins when as many requests wait and
the batch before it has ended; dynamic batching also begins a smaller one when the oldest request has waited
`--timeout`; with continuous batching, the product's, a request joins as soon as a place is free. The schedulers are
those of the product in all three, and steps cost what the roofline of `--gpu` says.

For each policy and rate: answer tokens/s until the last answer, the share of the batch's places that a step filled, the
padding (the share of a batch's places in which the request has ended while another of its batch goes on), and TTFT.
"""

import argparse
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.command_line import Measured, above_0, at_least, run_case
from benchmarks.results import run_facts
from benchmarks.strategies.stage import make_cluster, make_requests
from tandem.capacity.simulation.cluster import VirtualCluster
from tandem.capacity.simulation.hardware import Hardware, hardware
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.request import LoadRequest, Outcome
from tandem.cli.load.synthetic import Lengths, Synthetic
from tandem.cli.load.workload import parse_rates
from tandem.cost_model.devices import DEVICES, device_kind
from tandem.engine.models.shapes import shape_names
from tandem.settings.slo import BEST_EFFORT

POLICIES = ("static", "dynamic", "continuous")


@dataclass(slots=True)
class BatchGate:
    """Holds requests back until their batch begins. `wait_s` is the timeout; infinite = static batching."""

    cluster: VirtualCluster
    slots: int
    wait_s: float
    coming: int
    """Number of requests that have not arrived yet; the last batch may be smaller."""
    waiting: deque[LoadRequest] = field(default_factory=deque)
    running: int = 0
    computed_tokens: int = 0
    """Answer tokens that all places of all batches have computed, until the last answer of each batch has ended."""

    def arrive(self, request: LoadRequest) -> None:
        """Queue a request, and begin a batch if one is complete."""
        self.coming -= 1
        self.waiting.append(request)
        if self.wait_s < math.inf:
            self.cluster.clock.at(request.due_s + self.wait_s, self.begin)
        self.begin()

    def ended(self, outcome: Outcome) -> None:
        """Count an answer, and begin the next batch after the last answer of a batch."""
        self.cluster.outcomes.append(outcome)
        self.running -= 1
        self.begin()

    def begin(self) -> None:
        """Begin a batch if none runs, and if it is complete or its oldest request has waited long enough."""
        if self.running or not self.waiting:
            return
        waits = self.cluster.clock.now < self.waiting[0].due_s + self.wait_s
        if len(self.waiting) < self.slots and self.coming and waits:
            return
        batch = [self.waiting.popleft() for _ in range(min(self.slots, len(self.waiting)))]
        self.running = len(batch)
        self.computed_tokens += len(batch) * max(request.new_tokens for request in batch)
        for request in batch:
            self.cluster.router.arrive(request)


def run_policy(
    policy: str, machine: Hardware, requests: Sequence[LoadRequest], slots: int, timeout_s: float
) -> dict[str, object]:
    """Run a load with a policy until all requests have ended, and return the figures."""
    settings = {"mode": "colocated", "workers": 1, "max_batch_requests": slots}
    cluster = make_cluster(machine, settings, Network(chunks_per_s=None))
    tokens = computed = sum(request.new_tokens for request in requests)
    if policy == "continuous":
        outcomes = cluster.run(requests)
    else:
        gate = BatchGate(cluster, slots, timeout_s if policy == "dynamic" else math.inf, len(requests))
        cluster.router.on_end = gate.ended
        for request in requests:
            cluster.clock.at(request.due_s, lambda request=request: gate.arrive(request))  # type: ignore[misc]
        cluster.clock.run(math.inf)
        outcomes, computed = cluster.outcomes, gate.computed_tokens
    (worker,) = cluster.workers.values()
    ttft_s = np.array([outcome.firsts_s[0] - outcome.asked.due_s for outcome in outcomes])
    return {
        "policy": policy,
        "requests": len(outcomes),
        "failed": sum(bool(outcome.error) for outcome in outcomes),
        "tokens_per_s": round(tokens / max(outcome.ended_s for outcome in outcomes), 1),
        "slots_filled": round(tokens / (len(worker.log) * slots), 4),
        "padding": round(1 - tokens / computed, 4),
        "ttft_ms": {str(q): round(float(np.percentile(ttft_s, q)) * 1e3, 1) for q in (50, 90, 99)},
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--shape", choices=shape_names(), default="llama-3-8b", help="(llama-3-8b)")
    parser.add_argument("--gpu", default="H200", help=f"of the roofline: {', '.join(DEVICES)}")
    parser.add_argument("--slots", type=at_least(1), default=64, help="requests of a batch")
    parser.add_argument("--timeout", type=above_0, default=0.1, help="of dynamic batching, in seconds")
    parser.add_argument("--rates", default="2,8,32", help="requests a second")
    parser.add_argument("--seconds", type=above_0, default=60.0, help="of arrivals at each rate")
    parser.add_argument("--prompt-tokens", default="lognormal:500:0.8", help="a number, or lognormal:MEAN:SIGMA")
    parser.add_argument("--new-tokens", default="lognormal:300:0.8", help="a number, or lognormal:MEAN:SIGMA")
    parser.add_argument("--seed", type=int, default=0)


def measure(options: argparse.Namespace) -> Measured:
    """Run all policies at all rates, and print the table."""
    machine = hardware(options.shape, None, 100.0, 1.0, device=device_kind("--gpu", options.gpu).ceilings)
    source = Synthetic(
        Lengths.parse("--prompt-tokens", options.prompt_tokens), Lengths.parse("--new-tokens", options.new_tokens)
    )
    rows: list[dict[str, object]] = []
    for rate in parse_rates(options.rates):
        workload = source.at(rate, options.seconds, options.seed).fitted(machine.model.max_context)
        requests = make_requests(workload, machine.page_tokens, BEST_EFFORT)
        for policy in POLICIES:
            rows.append({"rate": rate, **run_policy(policy, machine, requests, options.slots, options.timeout)})
            print(rows[-1], flush=True)
    names = ("gpu", "slots", "timeout", "prompt_tokens", "new_tokens", "seconds", "seed")
    asked = {name: getattr(options, name) for name in names}
    return f"batching-{options.shape}", {
        "model": options.shape, **asked, "rows": rows, "dtype": "bfloat16", **run_facts("cpu")
    }  # fmt: skip


if __name__ == "__main__":
    run_case("batching", __doc__ or "", {"policies": "benchmarks.batching"})
