"""Log probabilities of prompts against those of all logits at once, for any chunks and any company in a step."""

from collections.abc import Sequence

import pytest
import torch

from tandem.engine.logprobs import logprobs
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.prompt_scoring import PIECE, PromptScores
from tandem.protocol.messages import TokenLogprobs
from tests.factories import draw, row, tiny_engine_config, write_tiny_model

PROMPT = [(7 * i * i + 3) % 150 for i in range(2 * PIECE + 21)]
TOP = 3


@pytest.fixture(scope="module", params=["llama3", "gemma2"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", request.param)
    return ModelRunner.load(tiny_engine_config(folder))


def pages(runner: ModelRunner, first: int = 0) -> list[int]:
    groups = runner.kv_pages.groups
    count = -(-len(PROMPT) // runner.page_tokens) * groups
    return list(range(first * count, (first + 1) * count))


def expected(runner: ModelRunner, prompt: Sequence[int]) -> list[TokenLogprobs]:
    """Returns the log probabilities from the logits of the whole prompt."""
    logits = runner.logits(StepBatch([row(list(prompt), 0, pages(runner), drawn=False)]), every_token=True)[:-1]
    values, ids = logprobs(logits, torch.tensor(prompt[1:]), TOP)
    return [
        TokenLogprobs(some[0], tuple(others), tuple(some[1:]))
        for some, others in zip(values.tolist(), ids.tolist(), strict=True)
    ]


def assert_same(actual: Sequence[TokenLogprobs], wanted: Sequence[TokenLogprobs]) -> None:
    for here, there in zip(actual, wanted, strict=True):
        assert here.top_ids == there.top_ids
        assert (here.chosen, *here.top) == pytest.approx((there.chosen, *there.top), abs=1e-4)


@pytest.mark.parametrize("chunk", [len(PROMPT), PIECE, PIECE + 1, 37, 1])
def test_chunks_of_a_prompt(runner: ModelRunner, chunk: int) -> None:
    scores = PromptScores(PROMPT, TOP)
    for start in range(0, len(PROMPT), chunk):
        some = PROMPT[start : start + chunk]
        last = start + chunk >= len(PROMPT)
        assert len(scores.chosen) == start
        result = runner.run(StepBatch([StepRow(some, start, pages(runner), draw() if last else None, scores=scores)]))
        assert (result.token_ids[0] is None) != last
    prompt_logprobs = scores.result()
    assert_same(list(prompt_logprobs.tokens()), expected(runner, PROMPT))
    plain = runner.run(StepBatch([row(PROMPT, 0, pages(runner))]))
    assert result.token_ids == plain.token_ids, "the answer is the same as without scores"


def test_scored_and_other_rows_in_one_step(runner: ModelRunner) -> None:
    short, long = PROMPT[:9], PROMPT[:70]
    wanted = expected(runner, short), expected(runner, long)
    runner.run(StepBatch([row(long, 0, pages(runner), drawn=False)]))
    plain = [runner.run(StepBatch([row([5], 70, pages(runner))])), runner.run(StepBatch([row(long, 0, pages(runner))]))]
    both = PromptScores(short, TOP), PromptScores(long, 0)
    others, groups = pages(runner, 1), runner.kv_pages.groups
    rows = [
        row([5], 70, pages(runner)),
        StepRow(short, 0, others[:groups], draw(), scores=both[0]),
        StepRow(long, 0, others[groups:], draw(), scores=both[1]),
    ]
    result = runner.run(StepBatch(rows))
    assert (result.token_ids[0], result.token_ids[2]) == (plain[0].token_ids[0], plain[1].token_ids[0])
    assert_same(list(both[0].result().tokens()), wanted[0])
    prompt_logprobs = both[1].result()
    assert (prompt_logprobs.top_count, prompt_logprobs.top_ids, prompt_logprobs.top) == (0, (), ())
    assert prompt_logprobs.chosen == pytest.approx([logprobs.chosen for logprobs in wanted[1]], abs=1e-4)


def test_logits_exist_for_a_piece_at_a_time(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    project = DecoderModel._logits

    def counted(model: DecoderModel, hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return project(model, hidden)

    monkeypatch.setattr(DecoderModel, "_logits", counted)
    for end, last in ((len(PROMPT) - 1, None), (len(PROMPT), draw())):
        runner.run(StepBatch([StepRow(PROMPT[:end], 0, pages(runner), last, scores=PromptScores(PROMPT, 0))]))
    assert sizes == [PIECE, PIECE, 20, PIECE, PIECE, 20, 1]


def test_a_prompt_of_one_token_has_nothing_to_score(runner: ModelRunner) -> None:
    scores = PromptScores(PROMPT[:1], TOP)
    plain = runner.run(StepBatch([row(PROMPT[:1], 0, pages(runner))]))
    chunk = StepRow(PROMPT[:1], 0, pages(runner), draw(), scores=scores)
    batch = StepBatch([chunk], StepBatch([row(PROMPT[:1], 0, pages(runner, 1))]).tokens)
    assert batch.scored
    assert runner.run(batch).token_ids == [*plain.token_ids] * 2
    assert scores.result().chosen == ()
