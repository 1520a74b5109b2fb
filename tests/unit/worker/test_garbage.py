"""A worker's finished objects are freed at once, without the garbage collector.

A collection takes long in a serving process.
"""

import gc
import weakref
from typing import Any

import pytest

from prefill_worker.handoff import Handoff
from tandem.protocol.messages import SamplingParams
from tests.fake_engine import PAGE_TOKENS
from tests.worker_pair import WorkerPair, until

PROMPT = list(range(11, 11 + 2 * PAGE_TOKENS))


async def test_hand_overs_do_not_wait_for_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Handoff]] = []
    begin = Handoff.__init__

    def note(self: Handoff, **given: Any) -> None:
        begin(self, **given)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Handoff, "__init__", note)
    async with WorkerPair() as pair:
        gc.collect()
        gc.disable()
        try:
            for number in range(4):
                output = pair.send(f"q{number}", PROMPT, SamplingParams(max_tokens=2))
                await until(lambda output=output: output.finish)  # type: ignore[misc]
            await pair.empty()
            assert len(made) == 4
            await until(lambda: not any(reference() for reference in made))
        finally:
            gc.enable()
