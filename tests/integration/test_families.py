"""Every family of `tests.factories.FAMILIES` through everything that a serving cluster does to a request.

Real engines and schedulers, a prefill and a decode worker in one process, and the in-memory transfer between them. All
memory of the caches that nobody has written is NaN. The tokens are those of transformers in float32.

In `make test` every family is handed over; what follows is run by one family of each kind of layers and pages.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.cache.page_pool import PagePool
from tandem.engine.config.kv import kv_groups
from tandem.engine.config.model import MixtureOfExperts, ModelSpec
from tandem.engine.kernels.kv_cache import tensors_of
from tandem.engine.models.load_spec import load_spec, parse_spec
from tandem.engine.steps.batch import StepBatch
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod
from tests.e2e.reference import Reference, compare
from tests.factories import FAMILIES, greedy_answer, row, tiny_engine_config, write_tiny_model
from tests.soak import soak
from tests.unit.engine.test_models import SEEDS, TOLERANCE
from tests.worker_pair import PairedRunner, RequestOutput, Sender, WorkerPair, until

PAGE = 16
CHUNK = 23
"""The largest number of tokens in a step: prompts are computed in chunks that end within pages."""
ANSWER = SamplingParams(max_tokens=24, logprobs=3)
LENGTHS = (1, 2 * PAGE, 5 * PAGE - 5)
"""The longest prompt is longer than every window of the table, and each answer crosses the end of a page."""
POOL = 64
RECEIVED = 5
"""The number of tokens that a router has received when the decode worker ends."""


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(str(lengths))
    return [[rng.randrange(3, 160) for _ in range(length)] for length in lengths]


class Served:
    """A tiny model of one family, and pairs of workers that serve it."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder = write_tiny_model(folder, family, seed=SEEDS.get(family, 7), eos_token_id=None)
        self.sparse = bool(load_spec(folder).sparse_shapes)

    @functools.cached_property
    def reference(self) -> Reference:
        return Reference(self.folder)

    def load(self, pages: int = POOL, **changes: Any) -> PairedRunner:
        """Returns an engine whose pool has some of its cache's pages, all of them NaN."""
        config = tiny_engine_config(self.folder, kv_cache_bytes=4 << 20, max_step_tokens=CHUNK, **changes)
        runner = PairedRunner.load(config)
        for tensor in tensors_of(runner.cache.tensor):
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
        assert pages <= runner.cache.pages
        runner.pool = PagePool(pages)
        return runner

    def pair(
        self,
        pages: int = POOL,
        *,
        both: bool = False,
        prefix_cache: bool = True,
        speculate: SpeculationMethod = SpeculationMethod.AUTO,
        **changes: Any,
    ) -> WorkerPair:
        return WorkerPair(
            pages=pages,
            prefill_pages=POOL,
            both=both,
            prefix_cache=prefix_cache,
            speculate=speculate,
            max_step_tokens=CHUNK,
            make_engine=lambda count: self.load(count, **changes),
        )

    def check(self, prompt: list[int], output: RequestOutput, tokens: int) -> None:
        """Asserts that an answer and its log probabilities are transformers' of a greedy one.

        Some tiny models repeat one token whatever the prompt is, but not with the same probability.
        """
        assert not output.error, output.message
        assert len(output.tokens) == tokens
        compare(tuple(prompt), output.tokens, self.reference)
        logprobs = self.reference.logprobs(tuple(prompt), tuple(output.tokens))
        wanted = torch.stack([row[list(token.top_ids)] for row, token in zip(logprobs, output.logprobs, strict=True)])
        actual = torch.tensor([token.top for token in output.logprobs])
        torch.testing.assert_close(actual, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def kind_of(spec: ModelSpec) -> Hashable:
    """Returns what schedulers, caches and hand-overs see of a model: its kinds of attention and of page groups."""
    attention = {(type(layer.attention), getattr(layer.attention, "sparse", False)) for layer in spec.layers}
    groups = {(group.window is None, group.depth > 1, len(group.layers) < group.depth) for group in kv_groups(spec)}
    return frozenset(attention), frozenset(groups)


def one_of_each_kind(families: Iterable[str]) -> list[Any]:
    """Returns the families as values of `parametrize`: one of each kind runs, with experts if possible; others soak."""
    specs = {family: parse_spec(FAMILIES[family]) for family in families}
    dense_first = sorted(specs, key=lambda family: any_experts(specs[family]))
    chosen = {kind_of(specs[family]): family for family in dense_first}
    return [pytest.param(family, marks=() if family in chosen.values() else soak) for family in specs]


def any_experts(spec: ModelSpec) -> bool:
    return any(isinstance(layer.feed_forward, MixtureOfExperts) for layer in spec.layers)


every_family = pytest.mark.parametrize("family", sorted(FAMILIES))
every_kind = pytest.mark.parametrize("family", one_of_each_kind(sorted(FAMILIES)))


@pytest.fixture
def served(family: str, tmp_path: Path) -> Served:
    return Served(tmp_path, family)


async def ask(pair: WorkerPair, name: str, prompt: list[int], sampling: SamplingParams = ANSWER) -> RequestOutput:
    """Runs one request to its end, and waits until every page is free or cached."""
    output, stays = pair.send(name, prompt, sampling), pair.prefill is pair.decode
    await until(lambda: output.finish and (output.error or output.pages or stays))
    await pair.empty()
    return output


async def hand_over(pair: WorkerPair, asked: list[list[int]]) -> list[RequestOutput]:
    """Returns the answers to prompts that arrive together, whose pages were all equal on both workers."""
    outputs = [pair.send(f"q{number}", prompt, ANSWER) for number, prompt in enumerate(asked)]
    await until(lambda: all(output.finish and (output.error or output.pages) for output in outputs))
    await pair.empty()
    kv: KvPages = pair.decode.engine.kv_pages
    state = pair.decode.worker.report.inspect()
    assert [output.pages for output in outputs] == [len(kv.sent(len(prompt), 0)) for prompt in asked]
    assert state.checksums_equal == sum(output.pages for output in outputs)
    return outputs


@every_family
async def test_tokens_after_a_hand_over_are_those_of_transformers(served: Served) -> None:
    asked = prompts(*LENGTHS)
    async with served.pair() as pair:
        for prompt, output in zip(asked, await hand_over(pair, asked), strict=True):
            served.check(prompt, output, ANSWER.max_tokens)


@every_kind
async def test_a_prefix_is_found_at_each_end_of_a_page(served: Served) -> None:
    """With other tokens after it, and as the whole prompt, whose last page is then computed again.

    A state is kept where two prompts part, so that state layers find the prefix at the third prompt.
    """
    sampling = replace(ANSWER, max_tokens=4)
    async with served.pair() as pair:
        kv: KvPages = pair.prefill.engine.kv_pages
        prompt, *tails = prompts(3 * kv.page_tokens + 3, 8, 7)
        served.check(prompt, await ask(pair, "first", prompt, sampling), 4)
        for end in range(kv.page_tokens, len(prompt), kv.page_tokens):
            for tail in tails if kv.state_groups else tails[1:]:
                output = await ask(pair, f"{end}, then {len(tail)}", prompt[:end] + tail, sampling)
                served.check(prompt[:end] + tail, output, 4)
            assert output.cached_tokens == end
        output = await ask(pair, "whole prompt", prompt[:end], sampling)
        assert output.cached_tokens == end - kv.page_tokens
        served.check(prompt[:end], output, 4)


@every_kind
async def test_preempted_answers_are_those_of_transformers(served: Served) -> None:
    """The pool has pages for three prompts, so that none of the answers can end while all three hold their pages."""
    kv = served.load().kv_pages
    asked, tokens = prompts(5, 6, 7), 2 * kv.page_tokens
    async with served.pair(3 * kv.held(7)) as pair:
        sender, sampling = Sender(pair, tokens), replace(ANSWER, max_tokens=tokens)
        outputs = await asyncio.gather(*(sender.run(f"q{n}", prompt, sampling) for n, prompt in enumerate(asked)))
        for prompt, output in zip(asked, outputs, strict=True):
            served.check(prompt, output, tokens)
        assert pair.decode.worker.report.load().preemptions == sum(sender.attempts.values()) - len(asked) > 0
        await pair.empty()


@every_kind
async def test_another_decode_worker_continues_an_answer(served: Served) -> None:
    """Greedy and with a seed: the prompt and the tokens so far give the tokens that the first worker would sample."""
    (prompt,) = prompts(2 * PAGE + 3)
    samplings = {"greedy": ANSWER, "seed": replace(ANSWER, temperature=0.9, top_p=0.95, seed=11)}
    async with served.pair() as pair:
        undisturbed = [await ask(pair, f"all of {name}", prompt, samplings[name]) for name in samplings]
        received = {name: pair.send(name, prompt, sampling) for name, sampling in samplings.items()}
        await until(lambda: all(len(output.logprobs) >= RECEIVED for output in received.values()))
        await pair.replace_decode()
        outputs = [
            pair.send(name, prompt, samplings[name], 2, output.tokens[:RECEIVED]) for name, output in received.items()
        ]
        await until(lambda: all(output.finish for output in outputs))
        for output, whole in zip(outputs, undisturbed, strict=True):
            assert output.tokens == whole.tokens
            for actual, wanted in zip(output.logprobs, whole.logprobs[RECEIVED:], strict=True):
                assert actual.top_ids == wanted.top_ids
                assert actual.top == pytest.approx(wanted.top, abs=TOLERANCE, rel=TOLERANCE)
        await pair.empty()


@every_kind
async def test_tokens_with_an_eight_bit_cache_are_those_of_one_engine(served: Served) -> None:
    """And the logits are close to those with a cache of float32, but for the positions that choose other experts."""
    if served.sparse:
        with pytest.raises(InvalidArgument, match="latents of sparse attention are not cached as int8") as caught:
            served.load(kv_cache_dtype="int8")
        assert caught.value.field == "kv_cache_dtype"
        return
    asked, alone = prompts(*LENGTHS), served.load(kv_cache_dtype="int8")
    async with served.pair(kv_cache_dtype="int8") as pair:
        for prompt, output in zip(asked, await hand_over(pair, asked), strict=True):
            assert output.tokens == greedy_answer(alone, prompt, ANSWER.max_tokens)
    batch = StepBatch([row(prompts(CHUNK)[0], 0, list(range(2 * alone.kv_pages.groups)))])
    wanted, actual = (runner.logits(batch, every_token=True) for runner in (served.load(), alone))
    errors = (actual - wanted).square().mean(dim=1).sqrt()
    assert 0 < errors.median() < 0.02 * wanted.std()
