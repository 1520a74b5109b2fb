"""Real models with state layers, through both workers: neither chunks, cached prefixes nor hand-overs change tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch
from tandem.protocol.messages import SamplingParams
from tests.factories import row, tiny_engine_config, write_tiny_model
from tests.worker_pair import PairedRunner, WorkerPair, until

ANSWER = 40
PROMPT = [(7 * position + 3) % 157 for position in range(110)]
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)


@pytest.fixture(params=["qwen3_next", "nemotron_h", "lfm2"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], PairedRunner]:
    config = tiny_engine_config(write_tiny_model(tmp_path, request.param), kv_cache_bytes=4 << 20)

    def make(_pages: int) -> PairedRunner:
        engine = PairedRunner.load(config, kernels=ReferenceKernels())
        assert isinstance(engine, PairedRunner)
        return engine

    return make


def alone(engine: ModelRunner, prompt: list[int]) -> list[int]:
    """Returns the greedy answer of one engine that computes the prompt in one chunk."""
    kv, tokens = engine.kv_pages, list(prompt)
    pages = list(range(kv.numbers(len(prompt) + ANSWER) * kv.groups))
    logits = engine.logits(StepBatch([row(tokens, 0, pages)]))
    for position in range(len(prompt), len(prompt) + ANSWER):
        tokens.append(int(logits[0].argmax()))
        logits = engine.logits(StepBatch([row(tokens[-1:], position, pages)]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("both", [False, True])
async def test_greedy_answers_are_those_of_one_engine(load: Callable[[int], PairedRunner], both: bool) -> None:
    """An equal prompt, one that is as long as whole pages, the next turn, and prompts that branch off at each page."""
    engine = load(0)
    page = engine.page_tokens
    prompts = [PROMPT, PROMPT, PROMPT[: 2 * page], [*PROMPT, *alone(engine, PROMPT), 5, 6]]
    for end in range(page, len(PROMPT), page):
        prompts += [[*PROMPT[:end], *[9] * tail] for tail in (3, page + 1)]
    async with WorkerPair(make_engine=load, max_step_tokens=23, both=both) as pair:
        cached = 0
        for number, prompt in enumerate(prompts):
            output = pair.send(f"q{number}", prompt, GREEDY)
            await until(lambda output=output: output.finish and (both or output.pages))
            assert not output.error, output.message
            assert output.tokens == alone(engine, prompt), number
            cached += output.cached_tokens
            await pair.empty()
        assert cached > 3 * page
