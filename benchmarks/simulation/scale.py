"""Measures the simulator on a large cluster; see the command below.

`python -m benchmarks.simulation.scale --workers 1000 --requests 1000000`

Prompts and answers are lognormal, half of the workers prefill. The last line is one JSON object; times are CPU time.
"""

import argparse
import gc
import json
import math
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.command_line import above_0, at_least
from benchmarks.results import run_facts, save_result
from benchmarks.simulation.stage import make_cluster
from tandem.capacity.simulation.cluster import VirtualCluster
from tandem.capacity.simulation.hardware import Hardware, hardware
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.prompt import VirtualPrompt, page_names
from tandem.capacity.simulation.request import LoadRequest
from tandem.settings.slo import BEST_EFFORT

_SIGMA = 0.8
_QUEUE = 1_000_000
_YOUNG = 50_000
"""New objects between two garbage collections; a simulation makes few cycles and keeps many objects."""


def large_cluster(machine: Hardware, workers: int) -> VirtualCluster:
    """Returns a cluster of pairs of a prefill and a decode worker."""
    pair = make_cluster(machine, {"mode": "disaggregated", "prefill": 1, "decode": 1}, Network())
    specs = [
        replace(each, config=replace(each.config, worker_id=f"{each.config.role.value}-{number}"))
        for number in range(workers // 2)
        for each in pair.specs
    ]
    return VirtualCluster(specs, replace(pair.config, max_queued_requests=_QUEUE), Network())


def requests(machine: Hardware, arguments: argparse.Namespace) -> Iterator[LoadRequest]:
    """Yields the requests one by one, so that they are never all in memory."""
    dice, due_s = random.Random(arguments.seed), 0.0
    longest = machine.model.max_context // 2
    for number in range(arguments.requests):
        due_s += dice.expovariate(arguments.rate * arguments.workers)
        prompt, answer = (
            min(longest, 1 + int(dice.lognormvariate(math.log(mean) - _SIGMA**2 / 2, _SIGMA)))
            for mean in (arguments.prompt_tokens, arguments.new_tokens)
        )
        names = page_names([(number, 0, prompt)], machine.page_tokens)
        yield LoadRequest(due_s, VirtualPrompt(number, prompt, names), answer, BEST_EFFORT)


def main() -> None:
    """Simulates the cluster, and prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workers", type=at_least(2), default=1000)
    parser.add_argument("--requests", type=at_least(1), default=1_000_000)
    parser.add_argument("--rate", type=above_0, default=2.0, help="requests a second and worker")
    parser.add_argument("--prompt-tokens", type=above_0, default=1000, help="mean")
    parser.add_argument("--new-tokens", type=above_0, default=180, help="mean")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    asked = parser.parse_args()
    machine = hardware("llama-3-8b", None, 100.0, 1.0)
    cluster = large_cluster(machine, asked.workers)
    ended: Counter[str] = Counter()
    cluster.router.on_end = lambda outcome: ended.update([outcome.error or "whole"])
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
    started = time.process_time()
    cluster.run(requests(machine, asked))
    cpu_s = time.process_time() - started
    steps = sum(len(worker.log) for worker in cluster.workers.values())
    result = {
        "workers": asked.workers,
        "requests": asked.requests,
        "ended": dict(ended),
        "virtual_s": round(cluster.clock.now, 1),
        "steps": steps,
        "cpu_s": round(cpu_s, 1),
        "us_per_request": round(cpu_s / asked.requests * 1e6, 1),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "dtype": "none",
        **run_facts("cpu"),
    }
    if asked.save:
        print("saved", save_result("simulation-scale", result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
