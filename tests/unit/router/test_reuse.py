"""The estimate of the gaps between turns: what it observes, how sure it is, and what it decides."""

import random

import httpx
import pytest

from router.requests import reuse
from router.requests.reuse import GapCounts, ReuseEstimate
from tandem.protocol.messages import CACHE_RETENTION_MAX_S
from tests.unit.router.conftest import Cluster


class Load:
    """Conversations whose turns add one page each."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.estimate = ReuseEstimate(self.gaps.append)
        self.now = 0.0
        self.made = 0

    def begin(self, pages: int = 7) -> list[bytes]:
        self.made += 1
        return [f"{self.made}/{page}".encode() for page in range(pages)]

    def ask(self, digests: list[bytes], tenant: str = "", after: float = 0.0, session: str = "") -> float:
        self.now += after
        return self.estimate.observe(tenant, digests, self.now, session)


def next_turn(prompt: list[bytes]) -> list[bytes]:
    return [*prompt, prompt[-1] + b" and more"]


def test_a_gap_is_that_to_the_latest_turn_which_the_prompt_continues() -> None:
    load = Load()
    prompt = load.begin()
    load.ask(prompt)
    load.ask([*prompt, b"second"], after=3.0)
    load.ask([*prompt, b"second", b"third"], after=20.0)
    load.ask([*prompt[:6], b"another branch"], after=1.0)
    assert load.gaps == [3.0, 20.0]
    counts = load.estimate.counts("", 7)
    assert (counts.support, counts.continued[2], sum(counts.continued)) == (2, 1, 1)
    assert load.estimate.counts("", 8).continued[5] == 1


def test_a_session_goes_on_although_its_prompts_differ() -> None:
    """Chat templates leave out earlier reasoning, so the next prompt need not begin with the last one."""
    load = Load()
    load.ask(load.begin(), "a", session="one")
    load.ask(load.begin(), "a", after=1.0, session="two")
    load.ask(load.begin(), "b", after=1.0, session="one")
    load.ask(load.begin(), "a", after=5.0, session="one")
    assert load.gaps == [7.0], "another tenant's session of this name is another one"
    unnamed = load.begin()
    load.ask(unnamed, "a")
    load.ask(next_turn(unnamed), "a", after=2.0, session="three")
    assert load.gaps == [7.0, 2.0]


def test_nothing_is_kept_without_support() -> None:
    load = Load()
    assert load.ask(load.begin()) == 0.0
    assert load.ask([]) == 0.0
    assert GapCounts().retention_s == 0.0


def test_prompts_are_kept_as_long_as_the_next_turn_is_likely() -> None:
    """Nine of ten conversations go on, after 5 to 8 seconds."""
    load = Load()
    for number in range(200):
        prompt = load.begin()
        load.ask(prompt, after=100.0)
        if number % 10:
            load.ask(next_turn(prompt), after=5.0 + number % 3)
    assert load.ask(load.begin()) == 8.0
    assert load.estimate.counts("", 7).probability(0) == pytest.approx(0.9, abs=0.02)
    assert load.estimate.counts("", 7).probability(4) == 0.0, "after 8 s none came"


def test_conversations_that_just_began_do_not_count_as_ended() -> None:
    """All go on after 60 s, in a load that grows: most turns are younger than that."""
    load = Load()
    starts, now = [], 0.0
    for number in range(400):
        now += 4.0 / (1 + number / 20)
        starts.append((now, load.begin()))
    turns = [*starts, *((start + 60.0, next_turn(prompt)) for start, prompt in starts)]
    for load.now, digests in sorted(turn for turn in turns if turn[0] <= now):
        load.ask(digests)
    counts = load.estimate.counts("", 7)
    assert sum(counts.continued) < counts.support / 2
    assert counts.probability(0) > 0.75


def test_tenants_and_depths_are_learned_apart() -> None:
    load = Load()
    for _ in range(50):
        agent, one_shot, long = load.begin(), load.begin(), load.begin(40)
        load.ask(agent, "agents")
        load.ask(long, "agents")
        load.ask(one_shot, "batch", after=1.0)
        load.ask(next_turn(agent), "agents", after=1.5)
    assert load.ask(load.begin(), "agents") == 4.0
    assert load.ask(load.begin(40), "agents") == 0.0
    assert load.ask(load.begin(), "batch") == 0.0


def test_the_longest_retention_is_the_limit_of_messages() -> None:
    counts = GapCounts(reached=[1000] * 18, continued=[0] * 17 + [1000])
    assert counts.retention_s == CACHE_RETENTION_MAX_S


def test_what_is_awaited_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "_TURNS_MAX", 100)
    load = Load()
    draw = random.Random(1)
    for _ in range(3000):
        load.ask(load.begin(draw.randrange(1, 30)), after=draw.choice((0.0, 1.0, 400.0)))
        assert len(load.estimate._awaited) <= 100
        assert sum(map(len, load.estimate._ages)) <= 3000
    load.ask([], after=1e6)
    load.ask([], after=1e6)
    assert not load.estimate._awaited
    assert not any(load.estimate._ages)


async def test_the_workers_are_told_what_the_router_has_learned(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}/v1", trust_env=False) as http:
        text = "a long prompt of some pages " * 20
        for number in range(8):
            body = {"prompt": f"{number} {text}", "max_tokens": 3}
            for more in ("", text):
                body["prompt"] += more
                assert (await http.post("/completions", json=body)).status_code == 200
        page = (await http.get(f"http://{cluster.endpoints.http_address}/metrics")).text
    first, *_, last = cluster.prefill.prefills[::2]
    assert first.retention_s == 0.0
    assert last.retention_s > 0.0
    assert cluster.decode.reservations[-2].retention_s == last.retention_s
    assert 'tandem_turn_gap_seconds_count{model="fake",role="router",worker="router"} 8.0' in page
