"""How many drafts a draft model computes, and whose context it stores for them, by the two fitted cost models."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import pytest

from decode_worker.draft_choice import GAIN_MIN, StepBounds
from decode_worker.model_speculation import MISSING_MAX, DraftCosts, ModelSpeculation, speculation_of
from decode_worker.speculation import PROBE_EVERY
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork
from tandem.engine.speculation.ngram import NgramProposer
from tandem.engine.speculation.proposer import (
    BatchProposer,
    Draft,
    DraftSource,
    ProposerName,
    WantedDraft,
)
from tandem.engine.steps.draft_groups import DRAFTS_MAX
from tandem.protocol.cost_parameters import CostParameters
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import SamplingParams

TARGET = StepCost(CostParameters(base_s=30e-3, row_s=0.5e-3, token_s=1e-3, context_s=0.0))
SMALL = StepCost(CostParameters(base_s=3e-3, row_s=0.1e-3, token_s=0.1e-3, context_s=0.0))
LARGE = StepCost(CostParameters(base_s=30e-3, row_s=0.5e-3, token_s=1e-3, context_s=0.0))
PAGE = 16


class FakeReservation:
    def __init__(self, prompt: int) -> None:
        self.original_prompt = [5] * prompt
        self.cache_salt = ""
        self.sampling = SamplingParams(1000)


class FakeRequest:
    """A running request with a prompt, whose answer is expected to have so many tokens."""

    leaving = False
    history = None
    first_draw = 1

    def __init__(self, prompt: int, answer: int) -> None:
        self.reservation = FakeReservation(prompt)
        self.token_ids = [7]
        self.committed = -(-(prompt + answer) // PAGE)

    @property
    def tokens(self) -> int:
        return len(self.reservation.original_prompt) + len(self.token_ids)


class FakeBatch:
    kv_read_once = False
    verifies = False

    def __init__(self, requests: Sequence[FakeRequest]) -> None:
        self.requests = requests
        self.in_flight_steps: Sequence[object] = ()
        self.kv = KvPages(PAGE)
        self.drafts: Mapping[Any, Draft] = {}

    def next_rows(self) -> tuple[Sequence[FakeRequest], StepWork]:
        context = sum(request.tokens for request in self.requests)
        return self.requests, StepWork(decode_rows=len(self.requests), decode_context_tokens=context)

    def rows_left(self, _: FakeRequest) -> int:
        return 1000

    def verifiable(self, _: FakeRequest, drafts: int) -> int:
        return drafts

    def positions_left(self, _: FakeRequest) -> int:
        return 100

    def next_position(self, request: FakeRequest) -> int:
        return request.tokens - 1

    def launch(self, drafts: Mapping[Any, Draft] | None = None) -> None:
        self.drafts = drafts or {}
        for request in self.requests:
            request.token_ids.append(7)


class FakeModel(BatchProposer):
    """Counts tokens whose KV is stored, and has memory for some requests."""

    source = DraftSource(ProposerName.DRAFT_MODEL)
    max_step_tokens = 2048

    def __init__(self, cost: StepCost, requests: int = 100) -> None:
        self._cost = cost
        self._free = requests
        self.known: dict[Hashable, int] = {}
        self.stored: dict[Hashable, int] = {}
        self.pieces: list[Mapping[Hashable, int]] = []

    @property
    def cost(self) -> StepCost:
        return self._cost

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str) -> None:
        self.known[key] = len(token_ids)

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        self.known[key] += len(token_ids)

    def leave(self, key: Hashable) -> None:
        del self.known[key]

    def missing(self, key: Hashable) -> int:
        return self.known[key] - self.stored.get(key, 0)

    def capacity(self, key: Hashable, drafts: int) -> int:
        if key not in self.stored and len(self.stored) == self._free:
            return 0
        self.stored.setdefault(key, 0)
        return drafts

    def store_context(self, pieces: Mapping[Hashable, int]) -> None:
        self.pieces.append(pieces)
        for key, tokens in pieces.items():
            assert 0 < tokens < self.missing(key)
            self.stored[key] += tokens

    def compute(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        for proposal in wanted:
            assert self.missing(proposal.key) <= MISSING_MAX
            self.stored[proposal.key] = self.known[proposal.key]
        return [[9] * len(proposal.draws) for proposal in wanted]


def bounds(seconds: float = math.inf, rows: int = 1000) -> StepBounds:
    return StepBounds(TARGET, seconds, rows)


@pytest.fixture(name="make")
def _make() -> Callable[..., tuple[Any, FakeBatch, FakeModel]]:
    def make(*requests: FakeRequest, cost: StepCost = SMALL, capacity: int = 100) -> tuple[Any, FakeBatch, FakeModel]:
        batch, model = FakeBatch(requests), FakeModel(cost, capacity)
        some: Any = batch
        return ModelSpeculation(model, some, lambda _: False, lambda *_: 0, clock=lambda: 0.0), batch, model

    return make


def learn(speculation: Any, accepted: int, times: int = 200) -> None:
    for _ in range(times):
        speculation._acceptance.observe(DraftSource(ProposerName.DRAFT_MODEL), DRAFTS_MAX, accepted)


def test_the_context_is_stored_in_pieces_before_the_first_draft(make: Any) -> None:
    request = FakeRequest(prompt=900, answer=200)
    speculation, batch, model = make(request)
    steps = 0
    while not batch.drafts and steps < 100:
        speculation.launch(bounds())
        steps += 1
    assert batch.drafts
    assert len(model.pieces) == steps - 1 > 2
    each_s = [SMALL.seconds(StepWork(tokens, 0.0)) for piece in model.pieces for tokens in piece.values()]
    plain_s = TARGET.decode_step_seconds(1, 1)
    assert max(each_s) <= plain_s + SMALL.parameters.base_s + 1e-9, "a piece delays a step by no more than a step"


def test_all_requests_have_as_many_drafts_as_pay(make: Any) -> None:
    speculation, batch, _ = make(FakeRequest(4, 100), FakeRequest(5, 100))
    learn(speculation, accepted=DRAFTS_MAX)
    speculation.launch(bounds())
    assert [len(draft.token_ids) for draft in batch.drafts.values()] == [DRAFTS_MAX, DRAFTS_MAX]
    learn(speculation, accepted=2)
    speculation.launch(bounds())
    assert [len(draft.token_ids) for draft in batch.drafts.values()] == [2, 2]
    speculation.launch(bounds(rows=5))
    assert [len(draft.token_ids) for draft in batch.drafts.values()] == [1, 1]
    speculation.launch(bounds(seconds=31e-3))
    assert not batch.drafts, "the step would miss a gap target"


def test_drafts_that_take_as_long_as_tokens_are_not_computed(make: Any) -> None:
    speculation, batch, model = make(FakeRequest(4, 100), cost=LARGE)
    learn(speculation, accepted=DRAFTS_MAX)
    for _ in range(3):
        speculation.launch(bounds())
        assert not batch.drafts
    assert not model.pieces
    assert not model.known, "a proposer that is not used is told nothing"


def test_rejected_drafts_end_and_probes_are_rare(make: Any) -> None:
    speculation, batch, _ = make(FakeRequest(4, 10_000))
    learn(speculation, accepted=0)
    with_drafts = []
    for _ in range(20 * PROBE_EVERY):
        speculation.launch(bounds())
        with_drafts.append(sum(len(draft.token_ids) for draft in batch.drafts.values()))
    assert 1 <= sum(with_drafts) <= 20
    learn(speculation, accepted=DRAFTS_MAX)
    for _ in range(50):
        speculation.launch(bounds())
    assert batch.drafts, "drafts that are accepted again come back"


def test_a_context_that_does_not_pay_is_not_stored(make: Any) -> None:
    long, short = FakeRequest(prompt=3000, answer=10), FakeRequest(prompt=20, answer=200)
    speculation, batch, model = make(long, short)
    learn(speculation, accepted=3)
    for _ in range(10):
        speculation.launch(bounds())
    assert list(batch.drafts) == [short]
    assert {key for piece in model.pieces for key in piece} == {short}


def test_without_memory_a_request_has_no_drafts(make: Any) -> None:
    first, second = FakeRequest(4, 100), FakeRequest(5, 100)
    speculation, batch, model = make(first, second, capacity=1)
    learn(speculation, accepted=3)
    for _ in range(5):
        speculation.launch(bounds())
        assert list(batch.drafts) == [first]
    speculation.leave(first)
    del model.stored[first]
    batch.requests = [second]
    for _ in range(5):
        speculation.launch(bounds())
    assert list(batch.drafts) == [second]


def test_the_predicted_seconds_are_those_of_both_models() -> None:
    costs = DraftCosts(TARGET, SMALL, StepWork(decode_rows=2, decode_context_tokens=20), 2, 20)
    prediction = costs.count([0.5, 0.25], kv_read_once=False)
    verify_s = 30e-3 + 6 * 0.5e-3
    propose_s = 2 * 3e-3 + (2 + 2 * 0.25 + 2) * 0.1e-3
    assert prediction.seconds == pytest.approx(verify_s + propose_s)
    assert prediction.saved_s == pytest.approx(31e-3 - (verify_s + propose_s) / 1.75)
    assert costs.count([], kv_read_once=False).saved_s == 0
    assert prediction.saved_s > (1 - 1 / GAIN_MIN) * 31e-3


def test_look_ups_have_no_such_control() -> None:
    batch: Any = FakeBatch([])
    assert not isinstance(speculation_of(NgramProposer(), batch, lambda _: False, lambda *_: 0), ModelSpeculation)
    assert isinstance(speculation_of(FakeModel(SMALL), batch, lambda _: False, lambda *_: 0), ModelSpeculation)
