"""Answers that continue on another worker after any of their tokens: token for token as without, whatever is sampled.

Two workers with a real tiny model, in one process. A move is an attempt that prefills the prompt and the tokens so far,
as a router sends it after a worker's death.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.messages import SamplingParams
from tandem.tokenizers.grammars import of_json_schema, of_regex
from tests.factories import tiny_engine_config, write_tiny_model
from tests.near_ties import near_ties
from tests.small_tokenizer import TOKENS, save_tokenizer
from tests.soak import examples
from tests.worker_pair import PairedRunner, RequestOutput, WorkerPair, until

OPTION_SETS = 12
TOKENS_MAX = 40
GRAMMARS = (
    "",
    "",
    of_regex("[a-f]{20,30}"),
    of_json_schema({"type": "array", "items": {"enum": ["ab", "cd", "efg"]}, "minItems": 4}),
)


def options(rng: random.Random) -> SamplingParams:
    """Return random sampling options; each is set in about half of the cases."""

    def either(value: Any, default: Any) -> Any:
        return rng.choice([value, default])

    grammar, limit = rng.choice(GRAMMARS), rng.randint(2, TOKENS_MAX)
    return SamplingParams(
        max_tokens=limit,
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
        seed=rng.randrange(1 << 60),
        top_k=either(rng.choice([1, 5, 200]), 0),
        top_p=either(rng.choice([0.5, 0.9, 0.99]), 1.0),
        min_p=either(0.02, 0.0),
        frequency_penalty=either(0.6, 0.0),
        presence_penalty=either(-0.4, 0.0),
        repetition_penalty=either(1.3, 1.0),
        logprobs=either(2, None),
        grammar=grammar,
        min_tokens=0 if grammar else either(rng.randint(1, limit), 0),
        stop_token_ids=either(tuple(rng.sample(range(3, TOKENS), 100)), ()),
        logit_bias=either(tuple((token, rng.uniform(-5, 5)) for token in rng.sample(range(3, TOKENS), 20)), ()),
        ignore_eos=either(True, False),
    )


async def placed(
    pair: WorkerPair, name: str, prompt: list[int], sampling: SamplingParams, so_far: list[int]
) -> RequestOutput:
    while True:
        try:
            return pair.send(name, prompt, sampling, 1 + bool(so_far), so_far)
        except ResourceExhausted:
            await asyncio.sleep(0.002)


@pytest.mark.timeout(3600)
async def test_an_answer_continues_after_each_token_under_all_options(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", vocab_size=TOKENS)
    save_tokenizer(folder)
    config = tiny_engine_config(folder, kv_cache_bytes=4 << 20, max_step_tokens=64)
    judge = PairedRunner.load(config)
    rng = random.Random(41)
    moves = ties = 0
    async with WorkerPair(make_engine=lambda _: PairedRunner.load(config), max_step_tokens=64) as pair:
        for number in range(examples(OPTION_SETS)):
            sampling = options(rng)
            prompt = [rng.randrange(3, TOKENS) for _ in range(rng.randint(1, 60))]
            whole = await placed(pair, f"{number} whole", prompt, sampling, [])
            await until(lambda output=whole: output.finish)
            assert not whole.error, whole.message
            moved = [
                await placed(pair, f"{number} from {count}", prompt, sampling, whole.tokens[:count])
                for count in range(len(whole.tokens))
            ]
            await until(lambda outputs=moved: all(output.finish for output in outputs))
            for count, output in enumerate(moved):
                assert not output.error, output.message
                moves += 1
                if (output.tokens, output.finish) != (whole.tokens, whole.finish):
                    assert near_ties(judge, prompt, output.tokens, sampling), (number, count, sampling)
                    ties += 1
                elif sampling.logprobs is not None:
                    chosen = [score.chosen for score in whole.logprobs[count:]]
                    assert [score.chosen for score in output.logprobs] == pytest.approx(chosen, abs=1e-4)
        await pair.empty()
    print(f"{moves} moves, {ties} of them with a near tie that rounding decided")
    assert ties <= moves // 100
