"""Draws of many steps on the device, launched one ahead, against the CPU sampler one step at a time."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine import logprobs, sampler
from tandem.engine.cuda.penalty_counts import PenaltyCounts
from tandem.engine.cuda.sampler_cuda import IN_PROMPT, DeviceSampler
from tandem.engine.cuda.token_draws import Drawn, TokenDraws
from tandem.engine.grammar_masks import GrammarMasks
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.engine.steps.sampling_metadata import NO_TOKEN, History, SamplingInput
from tandem.protocol.messages import SamplingParams, TokenLogprobs
from tandem.tokenizers.grammars import LazyGrammars, of_regex
from tests.factories import draw
from tests.fake_engine import small_grammars
from tests.small_tokenizer import EOS as END

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PDL = overlaps_launches()
VOCAB = 60
STEPS = 9
LIKELY = [3, 7, 30, 31]
GARBAGE = 5
"""A token that a graph may have written over those of the step before."""

KINDS: list[dict[str, Any]] = [
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {},
    {"repetition_penalty": 1.5, "logprobs": 4},
    {"temperature": 0.9, "frequency_penalty": 2.0, "seed": 5},
    {"logprobs": 0},
    {"temperature": 1.2, "top_k": 20, "repetition_penalty": 0.7, "presence_penalty": -1.0, "logprobs": 20, "seed": 6},
    {"repetition_penalty": 3.0},
    {"min_tokens": 5},
    {"min_tokens": 4, "stop_token_ids": (30,), "temperature": 0.9, "seed": 8, "logprobs": 3},
    {"min_tokens": 6, "ignore_eos": True, "frequency_penalty": 0.7, "temperature": 1.1, "top_p": 0.9, "seed": 9},
    {"logit_bias": ((3, -100.0), (7, -100.0), (40, 2.5)), "logprobs": 2},
    {"logit_bias": ((9, 3.0),), "min_tokens": 4, "temperature": 0.8, "presence_penalty": 0.6, "seed": 10},
]
EOS = (3, 31)
"""End tokens, chosen among the likely ones."""


@dataclass
class Request:
    """A request as a worker half runs it: `answer` is the part that the host knows."""

    sampling: SamplingParams
    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = History(self.prompt, self.answer) if self.sampling.penalized else None

    def draw(self, index: int) -> SamplingInput:
        return SamplingInput(self.sampling, index, self.history)


def some_requests(**changes: float) -> list[Request]:
    """Returns one request of each kind, with `changes` to its sampling."""
    return [Request(draw(**(kind | changes)).sampling, [n + 1, *LIKELY]) for n, kind in enumerate(KINDS)]


def logits_of(step: int, requests: int, dtype: torch.dtype) -> Tensor:
    """Returns logits of few likely tokens, so that penalties change many choices."""
    logits = torch.randn(requests, VOCAB, generator=torch.Generator().manual_seed(step))
    logits[:, LIKELY] += 2
    return logits.to(dtype)


def one_by_one(steps: int, dtype: torch.dtype, **changes: float) -> list[Request]:
    requests = some_requests(**changes)
    for step in range(steps):
        logits = logits_of(step, len(requests), dtype)
        draws = [request.draw(step) for request in requests]
        tokens = sampler.sample(logits, draws, EOS)
        scores = logprobs.score(logits, draws, tokens)
        for request, token, score in zip(requests, tokens.tolist(), scores, strict=True):
            request.answer.append(token)
            request.scores.append(score)
    return requests


def make_draws(
    rows: int, most: int = 16, masks: GrammarMasks | None = None
) -> tuple[TokenDraws, PenaltyCounts, Tensor]:
    """Returns draws for at most `rows` rows at once, and as many with penalties at a time."""
    drawn = torch.zeros(most, dtype=torch.int64, device=DEVICE)
    counts = PenaltyCounts(VOCAB, rows, DEVICE)
    return TokenDraws(DeviceSampler(VOCAB, rows, DEVICE, PDL), counts, drawn, EOS, masks, pdl=PDL), counts, drawn


def one_ahead(steps: int, rows: int, dtype: torch.dtype) -> list[Request]:
    """Launches each step before the host reads the tokens of the one before; rows are permuted in every step."""
    requests = some_requests()
    draws, _, drawn = make_draws(rows)
    memory = [draws.make_memory() for _ in range(2)]
    running: tuple[list[int], Drawn] | None = None

    def take(order: list[int], output: Drawn) -> None:
        tokens, scores = output
        for number, token, score in zip(order, tokens, scores, strict=True):
            requests[number].answer.append(token)
            requests[number].scores.append(score)

    for step in range(steps):
        order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(step)).tolist()
        asked = [requests[number].draw(step) for number in order]
        sources = [None if running is None else running[0].index(number) for number in order]
        late = draws.late_tokens(asked, sources)
        drawn.fill_(GARBAGE)
        logits = logits_of(step, len(requests), dtype)[order].to(DEVICE)
        read = draws.launch(logits, asked, late, memory[step % 2], greedy_is_drawn=False)
        if running is not None:
            take(*running)
        running = order, finished(read)
    assert running is not None
    take(*running)
    return requests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [len(KINDS), 2], ids=["a row of counts for each", "fewer rows than need some"])
def test_one_ahead_as_one_by_one(rows: int, dtype: torch.dtype) -> None:
    for actual, wanted in zip(one_ahead(STEPS, rows, dtype), one_by_one(STEPS, dtype), strict=True):
        assert actual.answer == wanted.answer, actual.sampling
        for here, there in zip(actual.scores, wanted.scores, strict=True):
            assert (here is None) == (there is None)
            if here is not None and there is not None:
                assert here.top_ids == there.top_ids
                assert (here.chosen, *here.top) == pytest.approx((there.chosen, *there.top), abs=1e-5)


def test_no_answer_ends_early() -> None:
    for request in one_by_one(STEPS, torch.bfloat16):
        early = request.answer[: request.sampling.min_tokens]
        assert not {*EOS, *request.sampling.stop_token_ids} & {*early}, request.sampling


def test_every_least_length_matters_here() -> None:
    for free, bound in zip(
        one_by_one(STEPS, torch.float32, min_tokens=0), one_by_one(STEPS, torch.float32), strict=True
    ):
        assert (free.answer != bound.answer) == (bound.sampling.min_tokens > 0), bound.sampling


def finished(read: Callable[[], Drawn]) -> Drawn:
    """Returns what `TokenDraws.launch` found, once the device has finished."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return read()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_are_unchanged_after_a_draw_that_may_not_end(temperature: float) -> None:
    draws, _, drawn = make_draws(2)
    logits = torch.full((2, VOCAB), -5.0, device=DEVICE)
    logits[:, EOS[0]], logits[:, 9] = 8.0, 7.0
    before = logits.clone()
    drawn[:2] = EOS[0]  # as a graph draws them, which knows nothing of least lengths
    asked = [draw(temperature=temperature, min_tokens=least, logprobs=1, seed=3) for least in (1, 0)]
    bound = replace(asked[0], index=0), replace(asked[1], index=0, sampling=replace(asked[1].sampling, temperature=0.0))
    tokens, scores = finished(draws.launch(logits, bound, [None, None], draws.make_memory(), greedy_is_drawn=True))
    assert tokens[0] != EOS[0]
    assert tokens[1] == EOS[0]
    assert torch.equal(logits, before)
    assert all(score is not None and score.top_ids == (EOS[0],) for score in scores)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_follow_a_grammar_and_logits_stay_the_models_own(temperature: float) -> None:
    """Beside a row without a grammar, whatever a graph drew before."""
    masks = GrammarMasks(LazyGrammars(small_grammars), EOS)
    draws, _, drawn = make_draws(2, masks=masks)
    asked = draw(temperature=temperature, grammar=of_regex("[#-%]{2}"), seed=3, logprobs=1).sampling
    answer: list[int] = []
    history = History([5], answer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        logits = torch.randn(2, VOCAB, generator=generator).to(DEVICE)
        before = logits.clone()
        drawn[:2] = GARBAGE
        bound = SamplingInput(asked, len(answer), history), draw(logprobs=1)
        tokens, scores = finished(draws.launch(logits, bound, [None, None], draws.make_memory(), greedy_is_drawn=True))
        assert tokens[1] == before[1].argmax()
        assert torch.equal(logits, before)
        assert all(score is not None for score in scores)
        answer.append(tokens[0])
    assert small_grammars().begin(asked.grammar).allowed(answer[:2])[0] == 1 << END
    assert answer[2] == END


def test_every_penalty_matters_here() -> None:
    """Without an effect of every penalty, the comparison above would show nothing."""
    plain = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    without = one_by_one(STEPS, torch.float32, **plain)
    for free, bound in zip(without, one_by_one(STEPS, torch.float32), strict=True):
        assert (free.answer != bound.answer) == bound.sampling.penalized, bound.sampling


def place(counts: PenaltyCounts, history: History, late: int | None = None) -> Tensor:
    """Returns the counts of one request for its next draw."""
    token = None if late is None else torch.tensor([late], device=DEVICE)
    (row,) = counts.place([SamplingInput(SamplingParams(1, presence_penalty=1.0), 0, history)], [token])
    return counts.counts[row]


def counted(row: Tensor) -> dict[int, tuple[bool, int]]:
    """Returns per token True if the prompt has it, and the number of times that the answer has it."""
    seen = {int(token): int(row[token]) for token in row.nonzero().flatten()}
    return {token: (count >= IN_PROMPT, count % IN_PROMPT) for token, count in seen.items()}


def test_prompt_and_answer_are_counted_apart_and_only_once() -> None:
    counts = PenaltyCounts(VOCAB, 2, DEVICE)
    history = History((9, 9, 4), [4, 6, 6])
    row = place(counts, history, late=6)
    assert counted(row) == {9: (True, 0), 4: (True, 1), 6: (False, 3)}
    row[11] += 1  # as the sampler counts the token it draws
    row[50] += 1  # would be lost if all were counted again
    history.answer = [4, 6, 6, 6]
    assert place(counts, history, late=11).data_ptr() == row.data_ptr()
    assert counted(row) == {9: (True, 0), 4: (True, 1), 6: (False, 3), 11: (False, 1), 50: (False, 1)}


def test_what_was_not_counted_here_is_counted_anew() -> None:
    """Counts are missing after a hand-over, or when a step's token was never drawn here."""
    counts = PenaltyCounts(VOCAB, 2, DEVICE)
    history = History((9,), [])
    place(counts, history)
    history.answer = [3, 5]
    assert counted(place(counts, history)) == {9: (True, 0), 3: (False, 1), 5: (False, 1)}


def test_a_full_store_takes_the_row_that_was_used_longest_ago() -> None:
    counts = PenaltyCounts(VOCAB, 2, DEVICE)
    old, kept, new = (History((token,), []) for token in (1, 2, 3))
    rows = [place(counts, slot).data_ptr() for slot in (old, kept)]
    assert rows[0] != rows[1]
    kept.answer = [8]
    assert place(counts, kept).data_ptr() == rows[1]
    assert place(counts, new).data_ptr() == rows[0]
    assert counted(place(counts, old)) == {1: (True, 0)}
    assert len(counts._lent) == 2


def test_a_draw_after_one_without_a_token_is_counted_within_the_vocabulary() -> None:
    """It is launched before the host knows; its request fails once the host does."""
    counts = PenaltyCounts(VOCAB, 2, DEVICE)
    assert counted(place(counts, History((9,), [4]), late=NO_TOKEN)) == {9: (True, 0), 4: (False, 1), 0: (False, 1)}


def test_equal_requests_have_rows_of_their_own() -> None:
    counts = PenaltyCounts(VOCAB, 2, DEVICE)
    assert place(counts, History((1,), [])).data_ptr() != place(counts, History((1,), [])).data_ptr()


def test_plain_greedy_tokens_that_are_drawn_already_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched for steps without randomness, penalties and log probabilities."""
    draws, _, drawn = make_draws(4)
    drawn[:2] = torch.tensor([17, 18])
    for name in ("_sample", "_score"):
        monkeypatch.setattr(TokenDraws, name, None)
    read = draws.launch(torch.zeros(4, VOCAB), [draw(), draw()], [None] * 2, draws.make_memory(), greedy_is_drawn=True)
    assert read() == ([17, 18], [])
    assert draws.late_tokens([draw(), draw()], [0, 1]) == [None, None]


def test_greedy_tokens_that_are_drawn_already_get_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    draws, _, drawn = make_draws(4)
    monkeypatch.setattr(TokenDraws, "_sample", None)
    drawn[:2] = torch.tensor([17, 18])
    logits = logits_of(0, 4, torch.float32)  # as a graph's, which may have more rows
    asked = [draw(), draw(logprobs=2)]
    read = draws.launch(logits.to(DEVICE), asked, [None] * 2, draws.make_memory(), greedy_is_drawn=True)
    tokens, scores = finished(read)
    assert tokens == [17, 18]
    assert scores[0] is None
    assert scores[1] is not None
    assert scores[1].chosen == pytest.approx(logits[1].log_softmax(-1)[18].item(), abs=1e-5)
    assert list(scores[1].top_ids) == logits[1].topk(2).indices.tolist()


def test_trials_leave_no_trace() -> None:
    draws, counts, _ = make_draws(3)
    for trial in draws.trials(torch.bfloat16).values():
        trial()
    assert counted(place(counts, History((2,), [4]))) == {2: (True, 0), 4: (False, 1)}


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_prompts_are_scored_as_on_a_host(top: int, dtype: torch.dtype) -> None:
    draws, _, _ = make_draws(2)
    logits = logits_of(1, 7, dtype)
    tokens = torch.tensor([3, 9, 59, 0, 30, 7, 12])
    values, ids = draws.score_tokens(logits.to(DEVICE), tokens.to(DEVICE), top)
    wanted, best = logprobs.logprobs(logits, tokens, top)
    torch.testing.assert_close(values.cpu(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(ids.cpu(), best)
