"""Measures the tokens that a step gains from trained heads, which guess while the model answers, as in serving."""

from collections.abc import Sequence

from tandem.engine.draft_training.answers import BATCH, AnswerGenerator, tokens_a_step
from tandem.engine.model_runner import ModelRunner
from tandem.engine.speculation.proposer import BatchProposer, WantedDraft
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import SamplingParams


def heads_tokens_a_step(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], most: int, drafts: Sequence[int]
) -> dict[int, float]:
    """Returns the tokens of a step by the most drafts, over greedy answers of at most `most` tokens.

    ValueError for a runner without heads.
    """
    proposer = None if runner.draft_proposer is None else runner.draft_proposer()
    if not isinstance(proposer, BatchProposer):
        raise ValueError("the runner has no heads")
    draws = [SamplingInput(SamplingParams(max_tokens=1), 0)] * max(drafts)
    guesses: list[list[Sequence[int]]] = []

    def drew(numbers: Sequence[int], tokens: Sequence[int]) -> None:
        wanted = []
        for row, (number, token) in enumerate(zip(numbers, tokens, strict=True)):
            if of_batch[number]:
                proposer.extend(number, [token])
            else:
                proposer.begin(number, [*some[number], token], "")
            wanted.append(WantedDraft(number, draws[: proposer.capacity(number, len(draws))], (row,)))
        for number, guessed in zip(numbers, proposer.compute(wanted), strict=True):
            of_batch[number].append(guessed)

    answers: list[list[int]] = []
    of_batch: list[list[Sequence[int]]] = []
    answering = AnswerGenerator(runner, 0.0, 0, drew)
    for start in range(0, len(prompts), BATCH):
        some = prompts[start : start + BATCH]
        of_batch = [[] for _ in some]
        answers += [output.token_ids for outputs in answering.answers(some, most) for output in outputs]
        guesses += of_batch
        for number in range(len(some)):
            proposer.leave(number)
    return {count: tokens_a_step(guesses, answers, count) for count in drafts}
