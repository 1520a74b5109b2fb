"""The loads of common uses: rates, lengths, and shared prefixes."""

from itertools import pairwise
from statistics import fmean

import pytest

from benchmarks.strategies.workloads import chosen_offers, offers
from tandem.cli.load.workload import Workload

_LONG_S = 400.0


def load(name: str, scale: float = 1.0) -> Workload:
    (offer,) = chosen_offers(offers([], scale, 1.0), name)
    return offer.source.at(2.0, _LONG_S, 3)


@pytest.mark.parametrize(
    ("name", "prompt", "answer"),
    [("doc-qa", 10_000, 100), ("chat", 500 + 300 + 2.5 * 500, 250), ("agents", 8000 + 2000 + 9.5 * 800, 200),
     ("rag", 300 + 5 * 800 + 50, 200)],
)  # fmt: skip
def test_requests_have_the_rate_and_lengths_of_their_use(name: str, prompt: float, answer: float) -> None:
    arrivals = load(name).arrivals
    assert len(arrivals) == pytest.approx(2 * _LONG_S, rel=0.25)
    assert fmean(arrival.prompt_tokens for arrival in arrivals) == pytest.approx(prompt, rel=0.2)
    assert fmean(arrival.new_tokens for arrival in arrivals) == pytest.approx(answer, rel=0.15)
    assert all(earlier.due_s <= later.due_s < _LONG_S for earlier, later in pairwise(arrivals))
    assert load(name) == load(name)
    assert fmean(arrival.prompt_tokens for arrival in load(name, 0.1).arrivals) == pytest.approx(
        0.1 * fmean(arrival.prompt_tokens for arrival in arrivals), rel=0.05
    )


@pytest.mark.parametrize("name", ["chat", "agents"])
def test_a_turn_begins_with_all_turns_before_it(name: str) -> None:
    conversations: dict[int, list[tuple[object, ...]]] = {}
    for arrival in load(name).arrivals:
        conversations.setdefault(arrival.prompt[1].key, []).append(arrival.prompt)
    grown = [pair for prompts in conversations.values() for pair in pairwise(prompts)]
    assert len(grown) > 200
    assert all(later[:-1] == earlier for earlier, later in grown)
    assert len({prompts[0][0] for prompts in conversations.values()}) == 1, "one system prompt"


def test_documents_are_shared_and_few_are_popular() -> None:
    prompts = [arrival.prompt for arrival in load("rag").arrivals]
    named = [block.key for prompt in prompts for block in prompt[1:-1]]
    assert all(len({block.key for block in prompt}) == 7 for prompt in prompts)
    assert named.count(1) > 5 * named.count(20)
    assert len({prompt[-1].key for prompt in prompts}) == len(prompts), "each has a question of its own"
