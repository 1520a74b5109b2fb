"""Hit rates of simulated caches on conversations, against references with complete knowledge."""

import random

import pytest

from tandem.capacity.simulation.request import LoadRequest
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tests.unit.capacity.simulation.stages import PAGE_TOKENS, cluster, request

BLOCK = 160
ANSWER = 40


def conversations(turns: int, count: int, *, together: bool = False) -> list[LoadRequest]:
    """Conversations in which each turn's prompt begins with the whole turn before.

    Turns are in random order, or with `together` all conversations' turns follow shortly after each other.
    """
    order = [number for _ in range(turns) for number in range(count)]
    if not together:
        random.Random(5).shuffle(order)
    said: dict[int, int] = {}
    made = []
    for at, number in enumerate(order):
        said[number] = turn = said.get(number, 0) + 1
        blocks = (0, *(1000 * (number + 1) + index for index in range(turn)))
        due_s = turn + number / 50 if together else float(at)
        made.append(request(due_s, BLOCK * len(blocks), ANSWER, blocks=blocks, key=at))
    return made


def seen_before(requests: list[LoadRequest]) -> list[int]:
    """Returns tokens of full pages seen before with the same prefix, less those that must be computed anyway."""
    seen: set[bytes] = set()
    hits = []
    for sent in requests:
        names = sent.prompt.names[: (len(sent.prompt) - 1) // PAGE_TOKENS]
        hits.append(next((n for n, name in enumerate(names) if name not in seen), len(names)) * PAGE_TOKENS)
        seen.update(sent.prompt.names)
    return hits


def kept_of_late(requests: list[LoadRequest], pages: int) -> list[int]:
    """Returns the same for a cache of `pages` pages: the least recently used path is evicted first, from its end."""
    used: dict[bytes, tuple[int, int]] = {}
    hits = []
    for moment, sent in enumerate(requests):
        names = sent.prompt.names
        readable = names[: (len(sent.prompt) - 1) // PAGE_TOKENS]
        held = next((n for n, name in enumerate(readable) if name not in used), len(readable))
        hits.append(held * PAGE_TOKENS)
        stored = len(sent.prompt) + sent.new_tokens - 1
        needed = -(-stored // PAGE_TOKENS) - held
        reading = set(names[:held])
        while pages - len(used) < needed:
            del used[min((name for name in used if name not in reading), key=lambda name: used[name])]
        full = [*names, *(b"answer %d %d" % (moment, n) for n in range(stored // PAGE_TOKENS - len(names)))]
        used.update({name: (moment, -number) for number, name in enumerate(full)})
    return hits


@pytest.mark.parametrize(
    ("mode", "roles"), [(Mode.COLOCATED, [Role.BOTH]), (Mode.DISAGGREGATED, [Role.PREFILL, Role.DECODE])]
)
def test_a_large_cache_hits_all_earlier_pages(mode: Mode, roles: list[Role]) -> None:
    asked = conversations(6, 8)
    outcomes = cluster(mode, roles).run(asked)
    assert [outcome.cached_tokens for outcome in outcomes] == seen_before(asked)
    assert sum(seen_before(asked)) > 0.7 * sum(len(sent.prompt) for sent in asked)


def test_a_small_cache_hits_recently_used_pages() -> None:
    asked = conversations(6, 8)
    reference = kept_of_late(asked, 250)
    outcomes = cluster(Mode.COLOCATED, [Role.BOTH], pages=250).run(asked)
    assert [outcome.cached_tokens for outcome in outcomes] == reference
    assert 0 < sum(reference) < 0.8 * sum(seen_before(asked)), "the cache is too small for all"


@pytest.mark.parametrize("mode", [Mode.COLOCATED, Mode.ADAPTIVE])
def test_the_router_places_a_conversation_where_its_pages_are_cached(mode: Mode) -> None:
    """Four workers have as many hits as one cache, except for the common prefix, which each computes once."""
    asked = conversations(6, 8, together=True)
    outcomes = cluster(mode, [Role.BOTH] * 4).run(asked)
    assert sum(outcome.cached_tokens for outcome in outcomes) >= sum(seen_before(asked)) - 3 * BLOCK
    assert len({outcome.decode_worker for outcome in outcomes}) > 1
