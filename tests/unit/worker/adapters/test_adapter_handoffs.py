"""Requests with adapters on real engines: handed over, colocated, with cached prefixes and with drafts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.load_spec import load_spec
from tandem.protocol.errors import NotFound
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod
from tandem.settings.parsing import NamedPath
from tandem.worker.transfer import layout_of
from tests.adapters import TinyAdapter
from tests.eagle_heads import write_eagle
from tests.factories import tiny_engine_config, write_tiny_model
from tests.worker_pair import RequestOutput, WorkerPair, until

pytestmark = pytest.mark.usefixtures("adapters_read_here")

PROMPT = [3 + number % 7 for number in range(70)]
"""Four full pages; it repeats, so that drafts are proposed."""
SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True)
ADAPTERS = [TinyAdapter(seed=1), TinyAdapter(seed=2, rank=7)]

Factory = Callable[[int], Any]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Factory:
    """A factory of engines with both adapters, and an EAGLE head."""
    folder = tmp_path_factory.mktemp("adapters")
    model = write_tiny_model(folder / "model")
    spec = load_spec(model)
    head = write_eagle(folder / "head", spec.hidden_size, spec.vocab_size)
    sources = tuple(
        NamedPath(str(number), adapter.write(folder / str(number))) for number, adapter in enumerate(ADAPTERS)
    )
    return lambda _pages: made(ModelRunner.load(tiny_engine_config(model, loras=sources, draft=head)))


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> list[Factory]:
    """Factories of engines of the base model, and of those into which each adapter is merged."""
    folder = tmp_path_factory.mktemp("merged")
    models = [write_tiny_model(folder / "base")]
    models += [adapter.merged(folder / str(number)) for number, adapter in enumerate(ADAPTERS)]
    return [lambda _pages, model=model: made(ModelRunner.load(tiny_engine_config(model))) for model in models]


def made(runner: Any) -> Any:
    runner.layout, runner.resume = layout_of(runner.cache), lambda: None
    return runner


def identities(pair: WorkerPair) -> list[str]:
    """Returns the hashes of both adapters, behind that of no adapter."""
    return ["", *(adapter.identity for adapter in pair.prefill.engine.adapters.facts)]


def send(pair: WorkerPair, name: str, adapter: str, prompt: Sequence[int] = PROMPT) -> RequestOutput:
    """Sends a request as the router does, whose salts differ by adapter."""
    output = pair.outputs[name] = RequestOutput([])
    reservation = pair.reservation(name, list(prompt), SAMPLING)
    lease = pair.decode.worker.reserve(replace(reservation, adapter=adapter, cache_salt=adapter)).lease
    task = pair.task(name, list(prompt), SAMPLING, lease)
    pair.prefill.worker.prefill(replace(task, adapter=adapter, cache_salt=adapter))
    return output


async def answers(pair: WorkerPair, adapters: Sequence[str]) -> list[list[int]]:
    outputs = [send(pair, f"request {number}", adapter) for number, adapter in enumerate(adapters)]
    for output in outputs:
        await until(lambda output=output: output.finish)
    return [output.tokens for output in outputs]


@pytest.fixture
async def wanted(merged: list[Factory]) -> list[list[int]]:
    """The answers of the base model and of both merged models."""
    token_lists = []
    for factory in merged:
        async with WorkerPair(both=True, make_engine=factory, max_step_tokens=32) as pair:
            token_lists += await answers(pair, [""])
    assert len({tuple(token_ids) for token_ids in token_lists}) == 3, "the adapters change nothing"
    return token_lists


@pytest.mark.parametrize("both", [True, False], ids=["colocated", "handed over"])
@pytest.mark.parametrize("speculate", [SpeculationMethod.OFF, SpeculationMethod.NGRAM, SpeculationMethod.DRAFT])
async def test_answers_are_those_of_the_merged_models(
    engines: Factory, wanted: list[list[int]], both: bool, speculate: SpeculationMethod
) -> None:
    """All at once, each twice: the second ones read the first ones' cached pages where the adapter is the same."""
    async with WorkerPair(both=both, make_engine=engines, max_step_tokens=32, speculate=speculate) as pair:
        names = identities(pair)
        assert await answers(pair, names) == wanted
        for number, (name, tokens) in enumerate(zip(names, wanted, strict=True)):
            again = send(pair, f"again {number}", name)
            await until(lambda again=again: again.finish)
            assert (again.tokens, again.cached_tokens) == (tokens, 64)
        if speculate is SpeculationMethod.DRAFT:
            assert pair.decode.worker._schedulers.decode.speculation.counts.drafted, "the head proposed nothing"


async def test_an_unknown_adapter_is_refused(engines: Factory) -> None:
    async with WorkerPair(make_engine=engines) as pair:
        with pytest.raises(NotFound, match="no adapter with the hash"):
            send(pair, "other", "00" * 16)
        task = replace(pair.task("other", PROMPT, replace(SAMPLING, max_tokens=1), None), adapter="00" * 16)
        with pytest.raises(NotFound, match="no adapter with the hash"):
            pair.prefill.worker.prefill(task)
        await pair.prefill.empty()


async def test_workers_with_other_adapters_exchange_the_kv_of_the_base_model(
    engines: Factory, merged: list[Factory], wanted: list[list[int]]
) -> None:
    """Which adapters a worker has changes while it serves; a request for one that it lacks is refused by itself."""
    given = iter([engines(0), merged[0](0)])
    async with WorkerPair(make_engine=lambda _pages: next(given)) as pair:
        assert await answers(pair, [""]) == wanted[:1]
        with pytest.raises(NotFound, match="no adapter with the hash"):
            send(pair, "request", identities(pair)[1])
