"""The batch, which keeps sums and notes, against one that looks at each request in each step."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from decode_worker.batch_snapshot import BUFFERED_STEPS, DecodedStep
from decode_worker.drafting_batch import DraftingBatch
from decode_worker.request import DecodeRequest
from decode_worker.running_batch import RunningBatch
from tandem.engine.cache.prefix_cache import Prefix
from tandem.engine.speculation.proposer import Draft, DraftSource, ProposerName
from tandem.engine.steps.batch import FROM_HOST, StepRow
from tandem.engine.steps.sampling_metadata import History
from tandem.protocol.ending import Ending
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import Lease, ModelFacts, PeerRef, RequestRef, Reservation, RoutedTokens, SamplingParams
from tests.soak import seeds

PAGE_TOKENS = 4
PEER = PeerRef("p", 1)
FACTS = ModelFacts("m", 1000, 4096, (2,), "float32")
STOP = 7
ROUTERS = ("one", "other")


@dataclass(eq=False)
class Known:
    """A request as anybody would write it down."""

    request: DecodeRequest
    said: list[int]
    launched: int = 0
    landed: int = 0
    stopped: bool = False
    over: bool = False

    @property
    def next_position(self) -> int:
        return self.request.prompt_tokens + len(self.said) + self.launched - self.landed - 1

    @property
    def due(self) -> bool:
        return not self.stopped and len(self.said) + self.launched - self.landed < self.request.ending.limit

    @property
    def short(self) -> bool:
        return self.due and self.next_position >= len(self.request.pages) * PAGE_TOKENS


@dataclass
class Model:
    """Both batches, and what they are asked."""

    dice: random.Random
    batch: RunningBatch = field(default_factory=lambda: RunningBatch(2, KvPages(PAGE_TOKENS)))
    known: list[Known] = field(default_factory=list)
    flying: deque[list[Known]] = field(default_factory=deque)
    drafts: dict[DecodeRequest, list[int]] = field(default_factory=dict)
    """The drafts of the newest step."""
    late: tuple[DecodedStep, list[RoutedTokens]] | None = None
    """The newest completed step, and its tokens as they were before the next one was planned."""
    accepted: int = 0
    dropped_drafts: int = 0
    made: int = 0
    ended: int = 0

    def join(self) -> None:
        dice, prompt = self.dice, tuple(range(10, 10 + self.dice.randrange(1, 12)))
        sampling = SamplingParams(
            dice.choice((2, 9, 2 * BUFFERED_STEPS, 150)),
            stop_token_ids=(STOP,) if dice.random() < 0.5 else (),
            ignore_eos=True,
            presence_penalty=dice.choice((0.0, 0.0, 1.0)),
            min_tokens=dice.choice((0, 0, 0, 1, 2, 7)),
            logprobs=dice.choice((None, None, None, 2)),
        )
        self.made += 1
        reservation = Reservation(dice.choice(ROUTERS), RequestRef(f"q{self.made}", 1), prompt, sampling, PEER)
        pages = -(-len(prompt) // PAGE_TOKENS)
        request = DecodeRequest(
            reservation, Lease(f"q{self.made}", 1, self.made), pages, pages, 0, b"", Prefix(b"", [], 0, []), 0
        )
        request.answer, request.pages = [100 + self.made], [1000 + self.made * 50 + index for index in range(pages)]
        request.ending = Ending.of(request.prompt_tokens, sampling, FACTS)
        if sampling.penalized:
            request.history = History(reservation.original_prompt, request.answer)
        self.known.append(Known(request, [request.answer[0]]))
        self.batch.join(request)

    def give_pages(self, share: float) -> None:
        needs_page = self.batch.without_page()
        assert set(needs_page) == {member.request for member in self.known if member.short}
        for request in needs_page:
            if self.dice.random() < share:
                request.pages.append(request.pages[0] + len(request.pages))
                self.batch.page_added(request)

    def launch(self) -> None:
        expected = [member for member in self.known if member.due and not member.short]
        self.drafts = {}
        if isinstance(self.batch, DraftingBatch):
            self.drafts = self.draft(self.batch, expected) if not self.flying else {}
            rows = self.batch.launch(
                {request: Draft(tokens, DraftSource(ProposerName.NGRAM, 2)) for request, tokens in self.drafts.items()}
            )
        else:
            rows = self.batch.launch()
        assert self.late is None or self.late[0].plain_tokens() == self.late[1]
        assert (rows is not None) == bool(expected)
        if rows is None:
            return
        assert len(rows) - len(rows.newest) == sum(map(len, self.drafts.values()))
        by_request = {member.request: member for member in expected}
        step = [by_request.pop(slot.request) for slot in self.batch.in_flight_steps[-1][1].slots]
        assert not by_request
        self.drafts = {member.request: self.drafts[member.request] for member in step if member.request in self.drafts}
        before = self.flying[-1] if self.flying else []
        assert rows.context_tokens == sum(row.start + 1 for row in rows)
        assert rows.newest.context_tokens == sum(row.start + 1 for row in list(rows)[: len(step)])
        assert rows.columns.longest == max(row.start + 1 for row in rows)
        draws = rows.columns.draws
        assert draws.masked == any(draw.index < draw.sampling.masked_tokens for draw in draws)
        self.check_draft_rows(step, list(rows)[len(step) :])
        for member, row in zip(step, list(rows)[: len(step)], strict=True):
            source = before.index(member) if member in before else None
            assert (row.start, row.source) == (member.next_position, source)
            assert source is not None or row.token_ids == (member.said[-1],)
            assert row.page_ids == member.request.pages
            assert row.draw is not None
            assert row.draw.index == row.start - member.request.prompt_tokens + member.request.first_draw
            assert row.draw.sampling is member.request.reservation.sampling
            member.launched += 1
        assert all(source == FROM_HOST or source < len(before) for source in rows.columns.sources)
        self.flying.append(step)

    def draft(self, batch: DraftingBatch, due: list[Known]) -> dict[DecodeRequest, list[int]]:
        """Random drafts for some requests, as far as their pages and limits go."""
        drafts = {}
        for member in due:
            request = member.request
            capacity = len(request.pages) * PAGE_TOKENS - member.next_position - 1
            assert batch.positions_left(request) == capacity
            assert batch.next_position(request) == member.next_position
            most = min(capacity, batch.rows_left(request) - 1, 5)
            if request.history is None and most > 0 and self.dice.random() < 0.7:
                drafts[request] = [self.dice.randrange(20, 60) for _ in range(self.dice.randint(1, most))]
        return drafts

    def check_draft_rows(self, step: list[Known], rows: list[StepRow]) -> None:
        """The rows behind those of the newest tokens are the drafts, at the positions that follow."""
        positions = {member.request: member.next_position for member in step}
        expected = [
            (token, positions[request] + distance, request)
            for request, tokens in self.drafts.items()
            for distance, token in enumerate(tokens, 1)
        ]
        assert len(rows) == len(expected)
        for row, (token, position, request) in zip(rows, expected, strict=True):
            assert (row.token_ids, row.start, row.source) == ((token,), position, None)
            assert row.page_ids == request.pages
            assert row.draw is not None
            assert row.draw.index == position - request.prompt_tokens + request.first_draw
            assert row.draw.sampling is request.reservation.sampling

    def draw(self, step: list[Known]) -> tuple[list[int], dict[DecodeRequest, list[int]]]:
        """Draws of all rows, often the draft; and the tokens that each request gains."""
        token = lambda: self.dice.choice((STOP, *range(20, 60)))  # noqa: E731
        drawn = {member.request: [token()] for member in step}
        gained = {request: [*tokens] for request, tokens in drawn.items()}
        further = []
        for request, drafts in self.drafts.items():
            row = drawn[request]
            if self.dice.random() < 0.7:
                row[0] = drafts[0]
            row += [draft if self.dice.random() < 0.7 else token() for draft in (*drafts[1:], STOP)]
            right = next((n for n, draft in enumerate(drafts) if row[n] != draft), len(drafts))
            gained[request] = row[: right + 1]
            further += row[1:]
        return [drawn[member.request][0] for member in step] + further, gained

    def land(self) -> None:
        step = self.flying.popleft()
        drawn, gained = self.draw(step)
        completed = self.batch.complete(drawn)
        reported: dict[str, tuple[int, list[int]]] = {}
        self.late = completed, completed.plain_tokens()
        for routed in self.late[1]:
            for event in routed.tokens.events():
                reported[event.ref.request_id] = (event.first_index, list(event.token_ids))
        events = {
            request: (index, list(tokens)) for request, index, tokens in map(completed.tokens, completed.event_rows)
        }
        for member in step:
            member.landed += 1
            request, name = member.request, member.request.reservation.ref.request_id
            if member.over:
                assert name not in reported
                assert request not in events
                continue
            first, ends = len(member.said), False
            for token in gained[request]:
                member.said.append(token)
                ends = request.ending.reason(token, len(member.said) - 1) is not None
                if ends:
                    break
            assert (request in events) != (name in reported), "tokens are reported once"
            assert (events.get(request) or reported[name]) == (first, member.said[first:])
            assert request in events or not (ends or request.reservation.sampling.logprobs is not None)
            self.accepted += len(member.said) - first - 1
            assert request.history is None or request.history.answer == member.said
            if ends:
                member.over = member.stopped = True
                self.batch.drop(request)
                self.ended += 1

    def leave(self) -> None:
        gone = self.batch.drained()
        over = [member for member in self.known if member.stopped and not any(member in step for step in self.flying)]
        assert set(gone) == {member.request for member in over}
        for member in over:
            self.batch.leave(member.request)
            assert member.request.answer == member.request.token_ids == member.said
            assert member.request.in_flight == 0
            self.known.remove(member)

    def disturb(self) -> None:
        """Somebody is cancelled, or gives way."""
        short = [member for member in self.known if member.short]
        member = self.dice.choice(short if short and self.dice.random() < 0.5 else self.known)
        if not member.stopped:
            member.stopped = True
            if self.dice.random() < 0.5:
                member.over = True
                self.batch.drop(member.request)
                self.dropped_drafts += bool(self.flying) and member.request in self.drafts
            else:
                self.batch.stop(member.request)

    def empty(self) -> None:
        """All requests are cancelled and leave; the batch keeps nothing of them."""
        for member in self.known:
            member.over = member.stopped = True
            self.batch.drop(member.request)
        while self.flying:
            self.land()
        self.leave()
        batch = self.batch
        assert (len(batch), list(batch.requests), batch.without_page(), batch.launch()) == (0, [], [], None)
        assert not (batch.waits_for_pages)
        assert not (batch.waits_for_tokens)
        assert not (batch._stopped)
        assert not (batch._without_page)
        assert not (batch._with_events)
        assert not (batch._with_history)
        assert not (batch._stop_sets)
        assert not (batch._stop_tokens)
        assert sorted(batch._free) == list(range(len(batch._columns)))

    def check(self) -> None:
        assert len(self.batch) == sum(not member.stopped for member in self.known)
        for member in self.known:
            assert member.request.in_flight == member.launched - member.landed
            if self.dice.random() < 0.1:
                assert member.request.token_ids == member.said


@pytest.mark.parametrize("ahead", [0, 1], ids=["each step by itself", "one step ahead"])
@seeds(4)
def test_it_does_what_one_that_counts_does(seed: int, ahead: int) -> None:
    model = Model(random.Random(seed))
    for _ in range(300):
        if len(model.known) < 6 and model.dice.random() < 0.3:
            model.join()
        model.leave()
        model.give_pages(share=model.dice.choice((0.2, 1.0)))
        model.launch()
        while len(model.flying) > ahead:
            model.land()
        if model.known and model.dice.random() < 0.02:
            model.disturb()
        model.check()
    model.empty()
    assert model.ended > 10


@pytest.mark.parametrize("ahead", [0, 1], ids=["each step by itself", "one step ahead"])
@seeds(4)
def test_drafts_change_no_more_than_the_number_of_steps(seed: int, ahead: int) -> None:
    batch = DraftingBatch(2, KvPages(PAGE_TOKENS))
    model = Model(random.Random(seed), batch)
    for _ in range(600):
        if len(model.known) < 6 and model.dice.random() < 0.3:
            model.join()
        model.leave()
        if not batch.verifies:
            model.give_pages(share=model.dice.choice((0.2, 1.0)))
            model.launch()
        if model.known and model.dice.random() < 0.05:
            model.disturb()  # perhaps while drafts of its are verified
        held = model.dice.random() < 0.5  # then the next step is launched when this one's tokens are here
        while len(model.flying) > (0 if held else ahead) or batch.verifies:
            model.land()
        if model.known and model.dice.random() < 0.02:
            model.disturb()
        model.check()
    model.empty()
    assert model.ended > 10
    assert model.accepted > 100
    assert model.dropped_drafts > 0
