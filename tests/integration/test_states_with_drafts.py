"""Speculation on every family with state layers: rejected draft tokens leave no trace in the states.

The proposer knows the answers and is right at a share of the positions, so that steps accept every number of draft
tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import tandem.worker.worker
from benchmarks.speculation.oracle import OracleProposer
from decode_worker.request import DecodeRequest
from decode_worker.speculation import Speculation
from tandem.engine.models.load_spec import parse_spec
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod
from tests.factories import FAMILIES
from tests.unit.engine.test_models import TOLERANCE
from tests.worker_pair import End, RequestOutput, Sender, until

from .test_families import PAGE, Served, ask, one_of_each_kind, prompts

DRAFTS = 5
ACCURACY = 0.6
TOKENS = 4 * PAGE
GREEDY = SamplingParams(TOKENS)
SAMPLINGS = (GREEDY, replace(GREEDY, temperature=0.9, top_p=0.95, seed=11), replace(GREEDY, temperature=1.1, seed=3))
LENGTHS = (5, 2 * PAGE - 1, 3 * PAGE + 2)
STATE_FAMILIES = sorted(family for family, config in FAMILIES.items() if parse_spec(config).has_states)


@pytest.fixture(params=one_of_each_kind(STATE_FAMILIES))
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Served:
    return Served(tmp_path, request.param)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], Sequence[int]]:
    """The answers that the proposer knows, by prompt; those of other prompts are drafted as one token repeated."""
    answers: dict[tuple[int, ...], Sequence[int]] = {}

    def whole(key: Hashable) -> Sequence[int]:
        assert isinstance(key, DecodeRequest)
        prompt = tuple(key.reservation.original_prompt)
        return [*prompt, *answers.get(prompt, [7] * TOKENS)]

    def make(method: SpeculationMethod, **_: object) -> OracleProposer | None:
        return None if method is SpeculationMethod.OFF else OracleProposer(whole, ACCURACY)

    monkeypatch.setattr(tandem.worker.worker, "make_proposer", make)
    return answers


def speculation_of(end: End, accuracy: float = ACCURACY) -> Speculation:
    speculation = end.worker._schedulers.decode.speculation
    assert speculation is not None
    assert isinstance(speculation._proposer, OracleProposer)
    speculation.fixed_drafts, speculation._proposer.alpha = DRAFTS, accuracy
    return speculation


async def plain_answers(served: Served, asked: Sequence[list[int]]) -> list[RequestOutput]:
    """Returns the answers without draft tokens, all computed at the same time."""
    async with served.pair(both=True, speculate=SpeculationMethod.OFF) as pair:
        outputs = [pair.send(f"q{n}", *both) for n, both in enumerate(zip(asked, SAMPLINGS, strict=True))]
        await until(lambda: all(output.finish for output in outputs))
        return outputs


async def test_answers_after_hand_overs_and_preemptions_are_those_without_drafts(
    served: Served, known: dict[tuple[int, ...], Sequence[int]]
) -> None:
    asked = prompts(*LENGTHS)
    plain = await plain_answers(served, asked)
    known |= {tuple(prompt): output.tokens for prompt, output in zip(asked, plain, strict=True)}
    kv = served.load().kv_pages
    # Two of the three answers fit into the pool.
    async with served.pair(2 * kv.held(max(LENGTHS) + TOKENS, decoding=True) + kv.groups) as pair:
        speculation = speculation_of(pair.decode)
        sender = Sender(pair, TOKENS)
        tasks = (sender.run(f"q{n}", *both) for n, both in enumerate(zip(asked, SAMPLINGS, strict=True)))
        outputs = await asyncio.gather(*tasks)
        assert [output.tokens for output in outputs] == [output.tokens for output in plain]
        assert sum(sender.attempts.values()) > len(asked), "one was preempted"
        drafted, accepted = sum(speculation.counts.drafted.values()), sum(speculation.counts.accepted.values())
        assert TOKENS < accepted < drafted
        await pair.empty()


@pytest.mark.parametrize(("tokens", "accuracy"), [(PAGE - 1, 0.6), (2 * PAGE, 1.0), (3 * PAGE + 5, 0.9)])
async def test_the_next_turn_begins_with_the_state_that_accepted_drafts_left(
    tokens: int, accuracy: float, served: Served, known: dict[tuple[int, ...], Sequence[int]]
) -> None:
    """States at the ends of pages are kept though the step that reached them went on, or drafted too far."""
    (prompt,), (tail,) = prompts(2 * PAGE + 3), prompts(9)
    sampling, scored = replace(GREEDY, max_tokens=tokens), replace(GREEDY, logprobs=2)
    async with served.pair(both=True, speculate=SpeculationMethod.OFF) as pair:
        first = await ask(pair, "first", prompt, sampling)
        turn = [*prompt, *first.tokens, *tail]
        second = await ask(pair, "second", turn, scored)
    known |= {tuple(prompt): first.tokens, tuple(turn): second.tokens}
    async with served.pair(both=True) as pair:
        speculation = speculation_of(pair.decode, accuracy)
        assert (await ask(pair, "first", prompt, sampling)).tokens == first.tokens
        output = await ask(pair, "second", turn, scored)
        stored, page = len(prompt) + tokens - 1, pair.decode.engine.kv_pages.page_tokens
        assert output.cached_tokens == stored // page * page
        assert output.tokens == second.tokens
        for now, then in zip(output.logprobs, second.logprobs, strict=True):
            assert now.top == pytest.approx(then.top, abs=TOLERANCE, rel=TOLERANCE)
        assert sum(speculation.counts.accepted.values()) > tokens // 2
