"""Answers of workers with speculative decoding: token for token as without, whatever is drafted."""

import asyncio
from collections.abc import Hashable, Sequence
from typing import Any, cast

import pytest
import torch

import tandem.worker.worker
from benchmarks.speculation.oracle import OracleProposer
from decode_worker.batch_snapshot import DecodedStep
from decode_worker.request import DecodeRequest
from decode_worker.speculation import Speculation
from tandem.cost_model.answer_length import SEEN_MIN
from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.engine.speculation.draft_model import DraftModel
from tandem.engine.speculation.eagle.proposer import EagleProposer
from tandem.engine.speculation.load_draft import MakeProposer
from tandem.engine.speculation.ngram import NgramProposer
from tandem.engine.speculation.proposer import BatchProposer, DraftSource, Proposer, ProposerName, WantedDraft
from tandem.engine.speculation.suffix import SuffixProposer
from tandem.engine.steps.batch import ModelRunnerOutput, StepBatch, StepRow
from tandem.protocol.errors import InvalidArgument, ResourceExhausted
from tandem.protocol.messages import FinishReason, SamplingParams
from tandem.tokenizers.grammars import of_regex
from tandem.worker.output_streams import OutputStreams
from tandem.worker.worker import Worker
from tests.fake_engine import EOS, PAGE_TOKENS, FakeEngine, answer_to, logprobs_of, whole_text
from tests.worker_pair import RequestOutput, WorkerPair, until

PROMPTS = [[n + 3, *range(20, 22 + n)] for n in range(8)]
SAMPLINGS = [
    SamplingParams(61),
    SamplingParams(60, temperature=0.8, seed=7, logprobs=2),
    SamplingParams(59, presence_penalty=0.5),
    SamplingParams(2),
    SamplingParams(50, min_tokens=30, stop_token_ids=tuple(range(3, 60))),
    SamplingParams(40, logit_bias=tuple((token, -100.0) for token in range(3, 500))),
    SamplingParams(40, grammar=of_regex("[a-f]{20,30}"), temperature=0.7, seed=3),
]
WINDOWS = (None, 5, 3)


@pytest.fixture(autouse=True, params=[False, True], ids=["", "asynchronous"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "asynchronous", request.param)


@pytest.fixture(params=["n-grams", "suffix", "oracle", "wrong", "computed", "draft model", "eagle"])
def proposer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All workers propose like this."""
    propose_by(monkeypatch, request.param)
    return str(request.param)


def propose_by(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rates = {"oracle": 0.7, "wrong": 0.0}

    def make(*_: object, trained: MakeProposer | None, **__: object) -> Proposer:
        if trained is not None:
            return trained()
        if name in rates:
            return OracleProposer(whole_text, rates[name])
        return SuffixProposer() if name == "suffix" else NgramProposer()

    if name == "draft model":
        monkeypatch.setattr(FakeEngine, "draft_proposer", draft_model)
    if name == "eagle":
        monkeypatch.setattr(FakeEngine, "draft_proposer", eagle)
    if name == "computed":
        monkeypatch.setattr(FakeEngine, "draft_proposer", computing_oracle)
    monkeypatch.setattr(tandem.worker.worker, "make_proposer", make)


class Doubting(FakeEngine):
    """A draft model whose draw is wrong behind each seventh position."""

    def _row(self, row: StepRow) -> int | None:
        try:
            token = super()._row(row)
        except InvalidArgument:  # its last draw was wrong by the grammar, too
            return EOS
        return token if token is None or row.start % 7 else token - 1


def draft_model(_: FakeEngine) -> DraftModel:
    """Its pool is too small for some requests."""
    return DraftModel(Doubting(pages=100 * len(FakeEngine.windows)))


class ComputingOracle(OracleProposer, BatchProposer):
    """Computes all drafts of a step at once, and knows them only where the newest step drew the newest token."""

    source = DraftSource(ProposerName.MEDUSA)
    max_step_tokens = 2048
    cost = StepCost(CostParameters(base_s=1e-4, row_s=0.0))

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(whole_text, 0.7)
        self._engine = engine

    def compute(self, wanted: Sequence[WantedDraft]) -> list[Sequence[int]]:
        drafts: list[Sequence[int]] = []
        for draft in wanted:
            assert isinstance(draft.key, DecodeRequest)
            drawn = [self._engine.drawn[row] for row in draft.rows]
            assert drawn == draft.key.token_ids[len(draft.key.token_ids) - len(drawn) :], "rows drew other tokens"
            drafts.append(self.propose(draft.key, len(draft.draws)).token_ids if drawn else ())
        return drafts


class FakeHead(FakeEngine):
    """An EAGLE head that mostly knows the answers, of tokens whose states say which tokens they drew."""

    def __init__(self) -> None:
        super().__init__(pages=100 * len(FakeEngine.windows))
        self.following: dict[tuple[int, int], int] = {}
        self._given: list[int] = []

    @property
    def drawn_hidden(self) -> torch.Tensor:
        return states_of(self.drawn)

    def from_target(self, drawn: torch.Tensor) -> torch.Tensor:
        return drawn

    def give(self, states: torch.Tensor) -> None:
        self._given = (states[:, 0] / states[:, 1]).round().int().tolist()

    def run(self, batch: StepBatch) -> ModelRunnerOutput:
        assert [row.token_ids[0] for row in batch.rows] == self._given, "a token has the state of another one"
        return super().run(batch)

    def _row(self, row: StepRow) -> int | None:
        super()._row(row)
        assert row.draw is not None
        return self.following.get((row.token_ids[0], row.draw.index), 3) - (row.draw.index % 7 == 0)


class FakeStates:
    """The `drawn_hidden` of a fake engine."""

    device = torch.device("cpu")

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    def __len__(self) -> int:
        return len(self._engine.drawn)

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        return states_of(self._engine.drawn)[rows]


def states_of(token_ids: Sequence[int | None]) -> torch.Tensor:
    """Returns states [n, 2] that say which tokens they drew."""
    return torch.tensor([[token or 0, 1.0] for token in token_ids])


class KnowingEagle(EagleProposer):
    """Tells its head the answers of the requests that begin."""

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        assert isinstance(key, DecodeRequest)
        super().begin(key, token_ids, cache_salt)
        head, text, first = self._head, whole_text(key), len(key.reservation.original_prompt)
        assert isinstance(head, FakeHead)
        head.following |= {(text[first + n - 1], n): text[first + n] for n in range(len(text) - first)}


def eagle(engine: FakeEngine) -> EagleProposer:
    return KnowingEagle(cast("Any", FakeHead()), cast("Any", FakeStates(engine)))


def computing_oracle(engine: FakeEngine) -> ComputingOracle:
    return ComputingOracle(engine)


def draft(pair: WorkerPair, count: int | None) -> None:
    for end in pair.ends:
        speculation = end.worker._schedulers.decode.speculation
        assert speculation is not None
        speculation.fixed_drafts = count


def accepted(of: Worker) -> int:
    speculation = of._schedulers.decode.speculation
    assert speculation is not None
    return sum(speculation.counts.accepted.values())


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("both", [False, True], ids=["", "one worker"])
async def test_answers_are_the_same(count: int, both: bool, proposer: str) -> None:
    asked = {f"q{n}": (prompt, SAMPLINGS[n % len(SAMPLINGS)]) for n, prompt in enumerate(PROMPTS)}
    async with WorkerPair(pages=256, both=both) as pair:
        draft(pair, count)
        outputs = {name: pair.send(name, *arguments) for name, arguments in asked.items()}
        await until(lambda: all(output.finish for output in outputs.values()))
        for name, (prompt, sampling) in asked.items():
            assert_whole(outputs[name], prompt, sampling)
        assert accepted(pair.decode.worker) > 20 or proposer not in {"oracle", "computed", "eagle"}
        assert not accepted(pair.decode.worker) or proposer != "wrong"
        await pair.empty()


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[-1]], ids=["", "grammar"])
async def test_an_answer_takes_fewer_steps(sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    propose_by(monkeypatch, "oracle")
    steps = []
    for count in (None, 3):
        async with WorkerPair(pages=64, both=True) as pair:
            draft(pair, count if count else 0)
            output = pair.send("q", PROMPTS[0], sampling)
            await until(lambda output=output: output.finish)
            steps.append(sum(len(event.token_ids) > 0 for step in pair.steps for event in step.each()))
    assert steps[0] == len(answer_to(PROMPTS[0], sampling))
    assert steps[1] < 0.6 * steps[0]


async def test_the_device_does_not_wait_for_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps are asynchronous, the next one is launched before the tokens of a verified one are published."""
    propose_by(monkeypatch, "oracle")
    open_steps, seen = 0, []

    def launch(self: FakeEngine, batch: Any) -> Any:
        nonlocal open_steps
        open_steps += 1
        return launched(self, batch)

    def publish(self: OutputStreams, *given: Any) -> None:
        nonlocal open_steps
        seen.append(open_steps)
        open_steps -= 1
        published(self, *given)

    launched, published = FakeEngine.launch, OutputStreams.publish
    monkeypatch.setattr(FakeEngine, "launch", launch)
    monkeypatch.setattr(OutputStreams, "publish", publish)
    async with WorkerPair(pages=64, both=True) as pair:
        draft(pair, 3)
        output = pair.send("q", PROMPTS[0], SAMPLINGS[0])
        await until(lambda: output.finish)
        assert_whole(output, PROMPTS[0], SAMPLINGS[0])
        assert accepted(pair.decode.worker)
    assert seen.count(2) >= len(seen) - 2 if FakeEngine.asynchronous else set(seen) == {1}


@pytest.mark.parametrize("at", range(1, 12))
async def test_a_stop_token_at_each_place_of_a_run_ends_the_answer(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    propose_by(monkeypatch, "oracle")
    prompt = PROMPTS[0]
    stop = answer_to(prompt, SamplingParams(40))[at]
    for sampling in (SamplingParams(40, stop_token_ids=(stop,)), SamplingParams(at + 1)):
        async with WorkerPair(pages=64) as pair:
            draft(pair, 7)
            output = pair.send("q", prompt, sampling)
            await until(lambda output=output: output.finish)
            assert_whole(output, prompt, sampling)
            await pair.empty()


async def test_seconds_saved_and_lost_never_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    propose_by(monkeypatch, "wrong")
    complete, seen = Speculation.complete, [(0.0, 0.0)]

    def record(self: Speculation, step: DecodedStep) -> None:
        complete(self, step)
        seen.append((self.counts.saved_s, self.counts.lost_s))

    monkeypatch.setattr(Speculation, "complete", record)
    async with WorkerPair(pages=64, both=True) as pair:
        draft(pair, 7)
        output = pair.send("q", PROMPTS[0], SAMPLINGS[0])
        await until(lambda: output.finish)
    saved, lost = zip(*seen, strict=True)
    assert list(saved) == sorted(saved)
    assert list(lost) == sorted(lost)
    assert lost[-1] > 0


async def test_nothing_is_drafted_for_requests_that_ask_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    propose_by(monkeypatch, "oracle")
    sampling = SamplingParams(40, speculate=False)
    async with WorkerPair(pages=64) as pair:
        draft(pair, 7)
        output = pair.send("q", PROMPTS[0], sampling)
        await until(lambda: output.finish)
        assert_whole(output, PROMPTS[0], sampling)
        assert not accepted(pair.decode.worker)


async def test_windows(monkeypatch: pytest.MonkeyPatch, proposer: str) -> None:
    monkeypatch.setattr(FakeEngine, "windows", WINDOWS)
    async with WorkerPair(pages=600, both=True) as pair:
        draft(pair, 5)
        outputs = [pair.send(f"q{n}", prompt, SAMPLINGS[0]) for n, prompt in enumerate(PROMPTS)]
        await until(lambda: all(output.finish for output in outputs))
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert_whole(output, prompt, SAMPLINGS[0])
        await pair.empty()


async def test_preempted_answers_are_the_same(proposer: str) -> None:
    async with WorkerPair(pages=26, prefill_pages=128) as pair:
        draft(pair, 3)
        lengths = pair.decode.worker.admission._budget._lengths
        for _ in range(SEEN_MIN):
            lengths.learn(60, 1)
        answers = await asyncio.gather(
            *(run(pair, f"q{n}", prompt, SAMPLINGS[n % 3]) for n, prompt in enumerate(PROMPTS[:7]))
        )
        for n, (prompt, output) in enumerate(zip(PROMPTS, answers, strict=False)):
            assert_whole(output, prompt, SAMPLINGS[n % 3])
        assert pair.decode.worker.report.load().preemptions
        await pair.empty()


async def test_aborts_leave_nothing(proposer: str) -> None:
    async with WorkerPair(pages=256) as pair:
        draft(pair, 3)
        outputs = {f"q{n}": pair.send(f"q{n}", prompt, SAMPLINGS[0]) for n, prompt in enumerate(PROMPTS)}
        await until(lambda: sum(len(output.tokens) > 5 for output in outputs.values()) > 3)
        pair.abort("q0", "q3", "q5")
        await until(lambda: all(outputs[f"q{n}"].finish for n in (1, 2, 4, 6, 7)))
        for n in (1, 2, 4, 6, 7):
            assert_whole(outputs[f"q{n}"], PROMPTS[n], SAMPLINGS[0])
        await pair.empty()


async def run(pair: WorkerPair, name: str, prompt: list[int], sampling: SamplingParams) -> RequestOutput:
    """Send a request, and once more behind its tokens whenever it was preempted."""
    so_far = RequestOutput()
    for attempt in range(1, 100):
        output = await placed(pair, name, prompt, sampling, attempt, so_far.tokens)
        await until(lambda output=output: output.finish or 0 <= output.preempted_at <= len(output.tokens))
        output.logprobs[:0] = so_far.logprobs
        so_far = output
        if output.finish:
            break
    return so_far


async def placed(pair: WorkerPair, *given: Any) -> RequestOutput:
    async with asyncio.timeout(60):
        while True:
            try:
                return pair.send(*given)
            except ResourceExhausted:
                await asyncio.sleep(0.002)


def assert_whole(output: RequestOutput, prompt: Sequence[int], sampling: SamplingParams) -> None:
    wanted = answer_to(list(prompt), sampling)
    assert output.tokens == wanted
    stopped = (wanted[-1] in sampling.stop_token_ids and len(wanted) > sampling.min_tokens) or wanted[-1] == EOS
    assert output.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert output.logprobs == ([logprobs_of(token, 2) for token in wanted] if sampling.logprobs else [])
    assert PAGE_TOKENS < 7, "drafts reach beyond a page"
