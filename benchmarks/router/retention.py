"""Compares what a worker keeps of prompts: `python -m benchmarks.router retention`.

Conversations of several tenants share one prefix cache, the product's own, with virtual pages. A turn begins with the
prompt and the answer of the turn before it. Agents go on within seconds and are mixed with one-shot prompts that never
go on. The figures are the shares of the agents' prompt tokens, and of all prompt tokens, that were read from the cache.

    no retention    least recently used first
    estimate        prompts are kept as the router's estimate says (`router/requests/reuse.py`)
    hints           agents say 5 minutes
    everything      every prompt is kept for 24 hours
    greedy tenant   the tenant of the one-shot prompts says 24 hours, the agents say nothing
    no shares       the same, and tenants may keep more than their share
"""

import argparse
import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from benchmarks.command_line import Measured, above_0, at_least
from benchmarks.results import run_facts
from router.requests.reuse import ReuseEstimate
from tandem.capacity.simulation.clock import VirtualClock
from tandem.capacity.simulation.prompt import PageNames, VirtualPrompt, page_names
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import RequestRef

PAGE_TOKENS = 64
FIRST_TOKENS, TURN_TOKENS = 2000, 600
"""Median tokens of a conversation's first prompt, and of what each turn adds, the answer before it included."""
ONE_SHOT = "one-shot"


@dataclass(slots=True)
class Conversation:
    """A conversation: its tenant, a key of its tokens, its tokens so far, and the turns that are left."""

    tenant: str
    key: int
    tokens: int
    turns: int


@dataclass(slots=True)
class Counts:
    """Prompt tokens and those that were read from the cache."""

    prompt: int = 0
    cached: int = 0

    @property
    def share(self) -> float:
        """The share of the tokens that were cached."""
        return self.cached / max(1, self.prompt)


@dataclass(slots=True)
class Cache:
    """A prefix cache whose requests begin and end at once."""

    pages: int
    clock: VirtualClock = field(default_factory=VirtualClock)
    cache: PrefixCache = field(init=False)
    requests: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        pool = PagePool(self.pages, self.clock)
        self.cache = PrefixCache(pool, KvPages(PAGE_TOKENS), names=PageNames())

    def run(self, prompt: VirtualPrompt, tenant: str, retention_s: float) -> int:
        """Serve a prompt and return its cached tokens."""
        owner = RequestRef(f"q{next(self.requests)}", 1)
        prefix = self.cache.prefix(prompt, tenant, tenant=tenant, retention_s=retention_s)
        pages, _ = self.cache.allocate(owner, prefix, math.ceil(len(prompt) / PAGE_TOKENS), len(prompt))
        cached = prefix.known * PAGE_TOKENS
        self.cache.publish(owner, prefix, pages)
        self.cache.leave(owner, prefix, pages)
        return cached


Policy = Callable[[ReuseEstimate, VirtualPrompt, str, float], float]
"""Returns for how many seconds the pages of a prompt are kept."""


def _estimated(estimate: ReuseEstimate, prompt: VirtualPrompt, tenant: str, now: float) -> float:
    return estimate.observe(tenant, prompt.names, now)


def _greedy(_estimate: ReuseEstimate, _prompt: VirtualPrompt, tenant: str, _now: float) -> float:
    return 86400.0 if tenant == ONE_SHOT else 0.0


_NO_SHARES = "no shares"
POLICIES: dict[str, Policy] = {
    "no retention": lambda *_: 0.0,
    "estimate": _estimated,
    "hints": lambda _estimate, _prompt, tenant, _now: 0.0 if tenant == ONE_SHOT else 300.0,
    "everything": lambda *_: 86400.0,
    "greedy tenant": _greedy,
    _NO_SHARES: _greedy,
}


def arrivals(dice: random.Random, seconds: float, one_shots: float, agents: float) -> Iterator[tuple[float, str, int]]:
    """Yield the starts of conversations: time, tenant and number of turns; rates are per second."""
    now = 0.0
    while (now := now + dice.expovariate(one_shots + agents)) < seconds:
        if dice.random() < one_shots / (one_shots + agents):
            yield now, ONE_SHOT, 1
        else:
            yield now, f"agents-{dice.randrange(3)}", 1 + int(dice.expovariate(1 / 12))


def simulate(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the cached shares under a policy; every policy gets the same conversations."""
    policy, dice = POLICIES[name], random.Random(options.seed)
    cache, estimate = Cache(options.pages), ReuseEstimate(lambda _gap_s: None)
    if name == _NO_SHARES:
        cache.cache.pool.limit_kept(lambda: options.pages)
    agents, everyone, keys, order = Counts(), Counts(), count(), count()
    due: list[tuple[float, int, Conversation]] = []
    for start, tenant, turns in arrivals(dice, options.seconds, options.one_shots, options.agents):
        first = int(FIRST_TOKENS * dice.lognormvariate(0, 0.5))
        heapq.heappush(due, (start, next(order), Conversation(tenant, next(keys), first, turns)))
    while due and due[0][0] < options.seconds:
        now, _, turn = heapq.heappop(due)
        cache.clock.now = now
        names = page_names([(turn.key, 0, turn.tokens)], PAGE_TOKENS)
        prompt = VirtualPrompt(turn.key, turn.tokens, names)
        cached = cache.run(prompt, turn.tenant, policy(estimate, prompt, turn.tenant, now))
        for counts in (everyone,) if turn.tenant == ONE_SHOT else (everyone, agents):
            counts.prompt, counts.cached = counts.prompt + turn.tokens, counts.cached + cached
        turn.turns -= 1
        if turn.turns:
            turn.tokens += int(TURN_TOKENS * dice.lognormvariate(0, 0.5))
            gap_s = options.gap_s * dice.lognormvariate(0, 1.0)
            heapq.heappush(due, (now + gap_s, next(order), turn))
    return {"agents": agents.share, "all": everyone.share}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--pages", type=at_least(500), default=5000, help="KV pages of the worker")
    parser.add_argument("--seconds", type=at_least(10), default=1800, help="simulated time")
    parser.add_argument("--one-shots", type=above_0, default=2.0, help="one-shot prompts per second")
    parser.add_argument("--agents", type=above_0, default=0.05, help="new conversations per second")
    parser.add_argument("--gap-s", type=above_0, default=20.0, help="median seconds between turns")
    parser.add_argument("--seed", type=int, default=1)


def measure(options: argparse.Namespace) -> Measured:
    """Return the cached shares of each policy."""
    shares = {name: simulate(name, options) for name in POLICIES}
    load = {name: getattr(options, name) for name in ("pages", "seconds", "one_shots", "agents", "gap_s", "seed")}
    return "retention", run_facts("cpu") | {"dtype": "none", "load": load, "cached_share": shares}
