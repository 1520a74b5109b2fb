"""Simulates what tiers of the prefix cache save when the KV of all conversations does not fit into the GPUs' memory.

    python -m benchmarks.kv_tiers --workers 16 --working-sets 1.3,4
    python -m benchmarks.kv_tiers --trace mooncake_conversation.jsonl --working-sets 1.3,4

The loads are those of `benchmarks/kv_tiers/load.py`, or a trace, whose requests arrive when they were recorded; its
working set is the number of tokens of all its different blocks ÷ the number of tokens whose KV fits into the GPUs.
Tiers load pages at the rates that are given, and nothing else is assumed about them: routers and workers decide as in a
cluster.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.command_line import Measured, at_least
from benchmarks.kv_tiers.load import LOADS, Agent, live_conversations, make_agent, question
from benchmarks.results import run_facts
from benchmarks.strategies.stage import make_cluster, make_requests
from tandem.capacity.simulation.cluster import VirtualCluster
from tandem.capacity.simulation.hardware import Hardware, hardware
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.prompt import VirtualPrompt, page_names
from tandem.capacity.simulation.request import LoadRequest, Outcome
from tandem.capacity.simulation.spec import TierSpec
from tandem.cli.load.trace import Trace, read_trace
from tandem.cli.load.workload import Arrival, parse_rates
from tandem.cost_model.devices import DEVICES, device_kind
from tandem.engine.memory import GIB
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.prefixes import KvTier
from tandem.settings.slo import BEST_EFFORT


def request_of(arrival: Arrival, due_s: float, number: int, page_tokens: int) -> LoadRequest:
    """Return a simulated request that is due at `due_s`; `number` is unique."""
    names = page_names([(block.key, 0, block.tokens) for block in arrival.prompt], page_tokens)
    prompt = VirtualPrompt(number, arrival.prompt_tokens, names)
    return LoadRequest(due_s, prompt, arrival.new_tokens, BEST_EFFORT)


@dataclass(slots=True)
class Agents:
    """Agents that run at the same time; an agent whose turns are over is replaced by a new one."""

    number: int
    seconds: float
    tool_s: float
    page_tokens: int
    seed: int
    sent: Iterator[int] = field(default_factory=lambda: count(1))

    def run(self, cluster: VirtualCluster) -> list[Outcome]:
        """Let all agents send their turns until the end, and return the outcomes of those that have ended."""
        running: dict[int, Agent] = {}

        def send(agent: Agent, due_s: float) -> None:
            if due_s < self.seconds:
                request = request_of(agent.arrival, due_s, next(self.sent), self.page_tokens)
                running[id(request)] = agent
                cluster.clock.at(due_s + cluster.network.ingress_s, lambda: cluster.router.arrive(request))

        def ended(outcome: Outcome) -> None:
            cluster.outcomes.append(outcome)
            agent = running.pop(id(outcome.asked))
            agent.turn += 1
            if agent.turn == agent.turns:
                agent = make_agent(agent.key + self.number, self.seed)
            send(agent, cluster.clock.now + agent.pause_s(self.tool_s))

        cluster.router.on_end = ended
        for key in range(1, self.number + 1):
            # Agents begin in the middle of their work, so that the working set is that of a long run.
            agent = make_agent(key, self.seed)
            agent.turn = agent.dice.randrange(agent.turns)
            send(agent, agent.dice.uniform(0.0, self.tool_s))
        cluster.clock.run(self.seconds)
        return cluster.outcomes


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: the tiers of all workers, and what the router knows of them."""

    name: str
    tiers: tuple[KvTier, ...] = ()
    seen: bool = True
    """False if the router places requests as if there were no tiers."""
    read_ahead: bool = True
    """False if a worker loads no page before the prompt is sent to it."""


_BOTH = (KvTier.HOST, KvTier.DISK)
ROWS = (
    Row("without tiers"),
    Row("host", (KvTier.HOST,)),
    Row("host and disk", _BOTH),
    Row("not seen by the router", _BOTH, seen=False),
    Row("not read ahead", _BOTH, read_ahead=False),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation: a row under one working set and one pause between turns."""

    row: Row
    working_set: float
    tool_s: float
    arguments: argparse.Namespace

    @property
    def seconds(self) -> float:
        """The simulated time."""
        asked = self.arguments
        return float(asked.seconds if asked.trace is not None else asked.turns * self.tool_s)

    def run(self) -> dict[str, object]:
        """Simulate the load, and return the figures of the requests that ended after the warm-up."""
        asked = self.arguments
        trace = None if asked.trace is None else read_trace(asked.trace)
        machine = hardware(asked.shape, None, 1.0, 1.0, device=device_kind("--gpu", asked.gpu).ceilings)
        tokens = asked.kv_gib * GIB / machine.kv_bytes_per_token * asked.workers
        if trace is not None:
            tokens = _different_tokens(trace, asked.seconds * asked.speed) / self.working_set
        machine = replace(machine, pages=int(tokens / asked.workers / machine.page_tokens))
        cluster = self._cluster(machine)
        live = live_conversations(self.working_set, tokens)
        if trace is None and asked.load == "agents":
            outcomes = Agents(live, self.seconds, self.tool_s, machine.page_tokens, asked.seed).run(cluster)
        elif trace is None:
            dice = random.Random(asked.seed)
            outcomes = cluster.run(self._questions(live, machine.page_tokens, dice), self.seconds)
        else:
            workload = trace.at_speed(asked.speed, asked.seconds, asked.seed).fitted(machine.model.max_context)
            outcomes = cluster.run(make_requests(workload, machine.page_tokens, BEST_EFFORT))
        figures = self._figures(cluster, outcomes)
        case = {"row": self.row.name, "working_set": self.working_set, "tool_s": self.tool_s, **figures}
        print(json.dumps(case), file=sys.stderr, flush=True)
        return case

    def _questions(self, live: int, page_tokens: int, dice: random.Random) -> Iterator[LoadRequest]:
        """Yield questions about `live` documents, or prompts that are all different, at random times."""
        due_s, documents = 0.0, live if self.arguments.load == "documents" else 0
        for number in count(1):
            due_s += dice.expovariate(live / self.tool_s)
            if due_s >= self.seconds:
                return
            yield request_of(question(number, documents, dice), due_s, number, page_tokens)

    def _cluster(self, machine: Hardware) -> VirtualCluster:
        asked = self.arguments
        pool = machine.pages * machine.page_bytes
        sizes = {KvTier.HOST: asked.host_times * pool, KvTier.DISK: asked.disk_times * pool}
        rates = {KvTier.HOST: asked.host_gbs * 1e9, KvTier.DISK: asked.disk_gbs * 1e9}
        tiers = tuple(TierSpec(tier, int(sizes[tier]), rates[tier]) for tier in self.row.tiers)
        made = make_cluster(machine, {"mode": "adaptive", "workers": asked.workers}, Network())
        cluster = VirtualCluster([replace(spec, tiers=tiers) for spec in made.specs], made.config, made.network)
        if not self.row.seen:
            for worker in cluster.workers.values():
                # The caches then report evicted pages as gone, whatever tiers have.
                worker.cache._tier_of = lambda _: None
        if not self.row.read_ahead:
            for link in cluster.router.links:
                link.read_ahead = lambda prompt: None  # type: ignore[method-assign]
        return cluster

    def _figures(self, cluster: VirtualCluster, outcomes: Sequence[Outcome]) -> dict[str, object]:
        warm_s = self.seconds * self.arguments.warm_up
        counted = [o for o in outcomes if o.ended_s >= warm_s and not o.error]
        if not counted:
            raise InvalidArgument("--turns", f"no request has ended after {warm_s:g} s; simulate for longer")
        # Requests that a worker refused at first have no placement to compare.
        stats = [o.placement for o in counted if o.placement is not None]
        ttft_s = np.array([o.firsts_s[0] - o.asked.due_s for o in counted])
        prompt = sum(len(o.asked.prompt) for o in counted)
        placed = sum(s.resident_tokens + s.reloaded_tokens + s.computed_tokens for s in stats)
        off = [abs(s.predicted.ttft_s - s.ttft_s) / s.ttft_s for s in stats if s.ttft_s > 0]
        span_s = max(self.seconds, cluster.clock.now) - warm_s
        return {
            "requests": len(counted),
            "requests_per_s": round(len(counted) / span_s, 3),
            "requests_per_s_in_time": round(float((ttft_s <= self.arguments.ttft_limit).sum()) / span_s, 3),
            "failed": sum(bool(o.error) for o in outcomes),
            "prompt_tokens_mean": round(prompt / max(1, len(counted))),
            "tokens_in_per_out": round(prompt / max(1, sum(o.asked.new_tokens for o in counted)), 1),
            "ttft_s": {str(q): round(float(np.percentile(ttft_s, q)), 4) for q in (50, 90, 99)},
            "resident": round(sum(s.resident_tokens for s in stats) / placed, 4),
            "reloaded": round(sum(s.reloaded_tokens for s in stats) / placed, 4),
            "computed": round(sum(s.computed_tokens for s in stats) / placed, 4),
            "busy": round(fmean(w.busy_s for w in cluster.workers.values()) / cluster.clock.now, 4),
            "ttft_error_median": round(float(np.median(off)), 4),
            "regret_s_mean": round(fmean(s.regret_s for s in stats), 5),
        }


def _different_tokens(trace: Trace, seconds: float) -> int:
    """Return the number of tokens in the different blocks of the requests of the first `seconds` seconds."""
    blocks = {b.key: b.tokens for request in trace.requests if request.due_s < seconds for b in request.prompt}
    return sum(blocks.values())


def as_text(cases: Sequence[dict[str, object]]) -> str:
    """Return the table as Markdown."""
    head = (
        "| working set | pause s | tiers | requests/s | in time | TTFT P50, P90, P99 s | resident | reloaded |"
        " computed | GPU busy | TTFT error | regret s |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    lines = [head]
    for case in cases:
        ttft: dict[str, float] = case["ttft_s"]  # type: ignore[assignment]
        shares = " | ".join(f"{case[name]:.1%}" for name in ("resident", "reloaded", "computed", "busy"))
        lines.append(
            f"| {case['working_set']:g} × | {case['tool_s']:g} | {case['row']} | {case['requests_per_s']:.2f} |"
            f" {case['requests_per_s_in_time']:.2f} | {ttft['50']:.2f}, {ttft['90']:.2f}, {ttft['99']:.2f} | {shares} |"
            f" {case['ttft_error_median']:.1%} | {case['regret_s_mean']:.3f} |"
        )
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--shape", default="llama-3.1-8b", help="the model")
    parser.add_argument("--gpu", default="H200", help=f"of the roofline: {', '.join(DEVICES)}")
    parser.add_argument("--workers", type=at_least(1), default=16, help="each with one GPU")
    parser.add_argument("--kv-gib", type=float, default=25.0, help="KV cache of each GPU, for agents")
    parser.add_argument("--working-sets", default="1.3,4", help="as multiples of the GPUs' KV caches")
    parser.add_argument("--trace", type=Path, default=None, help="Mooncake's .jsonl instead of agents")
    parser.add_argument("--speed", type=float, default=1.0, help="of the trace's arrivals")
    parser.add_argument("--load", choices=LOADS, default="agents")
    parser.add_argument("--tool-seconds", default="30", help="mean times between an agent's turns, comma-separated")
    parser.add_argument("--ttft-limit", type=float, default=2.0, help="a first token within it comes in time, seconds")
    parser.add_argument("--turns", type=float, default=8.0, help="simulated time, in pauses between turns")
    parser.add_argument("--seconds", type=float, default=300.0, help="simulated time of a trace")
    parser.add_argument("--warm-up", type=float, default=0.4, help="share of the time that is not counted")
    parser.add_argument("--host-gbs", type=float, default=40.0, help="rate of host memory, GB/s for each GPU")
    parser.add_argument("--disk-gbs", type=float, default=5.0, help="rate of the disk, GB/s for each GPU")
    parser.add_argument("--host-times", type=float, default=2.0, help="host memory as a multiple of the KV cache")
    parser.add_argument("--disk-times", type=float, default=20.0, help="disk as a multiple of the KV cache")
    parser.add_argument("--only", default="", help="these rows, comma-separated")
    parser.add_argument("--processes", type=at_least(1), default=1, help="simulations at a time")
    parser.add_argument("--seed", type=int, default=0)


def measure(options: argparse.Namespace) -> Measured:
    """Simulate all rows and print the table."""
    names = options.only.split(",") if options.only else [row.name for row in ROWS]
    sets = parse_rates(options.working_sets, "--working-sets")
    pauses = [0.0] if options.trace is not None else parse_rates(options.tool_seconds, "--tool-seconds")
    rows = [row for row in ROWS if row.name in names]
    cases = [Case(row, working_set, pause, options) for working_set in sets for pause in pauses for row in rows]
    run: Callable[[Case], dict[str, object]] = Case.run
    if options.processes == 1:
        figures = [run(case) for case in cases]
    else:
        with ProcessPoolExecutor(options.processes) as pool:
            figures = list(pool.map(run, cases))
    load = options.load if options.trace is None else options.trace.stem.replace("_", "-")
    print(f"\n{load}, {options.workers} workers\n\n{as_text(figures)}\n")
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    result = {"load": load, "options": asked, "cases": figures, "dtype": "bfloat16", **run_facts("cpu")}
    return f"kv-tiers-{load}-{options.shape}-{options.workers}-workers", result
