"""A worker keeps no object of a request that has ended, however it ended, with drafts and without."""

import gc

import pytest

import tandem.worker.worker
from benchmarks.speculation.oracle import OracleProposer
from decode_worker.batch_slots import BatchSlot
from decode_worker.request import DecodeRequest
from prefill_worker.request import PrefillRequest
from tandem.engine.speculation.draft_model import DraftModel
from tandem.engine.speculation.proposer import Proposer
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod
from tests.fake_engine import FakeEngine, answer_to, whole_text
from tests.soak import examples
from tests.worker_pair import WorkerPair, until

REQUESTS = examples(40)
TOGETHER = 8
PROMPT = [20, 21, 22, 23, 24]
LIMIT = 9


@pytest.fixture(params=["no drafts", "right drafts", "wrong drafts", "draft model"])
def drafts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How all workers of the test draft."""

    def make(method: SpeculationMethod, **_: object) -> Proposer | None:
        if request.param == "no drafts":
            return None
        if request.param == "draft model":
            return DraftModel(FakeEngine(pages=100))
        return OracleProposer(whole_text, 1.0 if request.param == "right drafts" else 0.0)

    monkeypatch.setattr(tandem.worker.worker, "make_proposer", make)
    return str(request.param)


def sampling_of(number: int, prompt: list[int]) -> SamplingParams:
    """Answers end by their limit, by a stop token at any place, or are longer than expected."""
    if number % 3 == 0:
        return SamplingParams(LIMIT)
    if number % 3 == 1:
        return SamplingParams(LIMIT, stop_token_ids=(answer_to(prompt, SamplingParams(LIMIT))[number % LIMIT],))
    return SamplingParams(LIMIT + number % 5, presence_penalty=0.5)


def alive() -> list[object]:
    """Returns the objects of all requests in this process, those of other tests too."""
    gc.collect()
    return [
        instance for instance in gc.get_objects() if isinstance(instance, (DecodeRequest, PrefillRequest, BatchSlot))
    ]


async def test_no_ended_request_stays_alive(drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "asynchronous", True)
    others = alive()  # kept, so that no other object gets the id of one
    known = {id(request) for request in others}
    async with WorkerPair(pages=100) as pair:
        if (speculation := pair.decode.worker._schedulers.decode.speculation) is not None:
            speculation.fixed_drafts = 3
        for first in range(0, REQUESTS, TOGETHER):
            outputs = {}
            for number in range(first, first + TOGETHER):
                prompt = [*PROMPT, 30 + number % 16]
                outputs[f"q{number}"] = pair.send(f"q{number}", prompt, sampling_of(number, prompt))
            pair.abort(f"q{first + 5}")
            rest = [output for name, output in outputs.items() if name != f"q{first + 5}"]
            await until(lambda rest=rest: all(output.finish for output in rest))
        await pair.empty()
        await until(lambda: all(id(request) in known for request in alive()))
        assert speculation is None or drafts == "wrong drafts" or sum(speculation.counts.accepted.values())
