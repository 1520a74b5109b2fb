"""The harness of `python -m tests.faults`, with a server that fails and errs when it is struck."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from tests.faults.__main__ import FaultRecord, campaign, failures
from tests.faults.mixed_load import MixedLoad, forms

MINUTES = 0.001


class StruckServer:
    """Answers with the fields of the request; after a strike, three requests with another status and text."""

    def __init__(self, status: int, text: str) -> None:
        self.status, self.text = status, text
        self.remaining = 0

    async def strike(self, part: str, act: str, rng: random.Random) -> None:
        self.remaining = 3

    async def handle(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        text, status = request.content.decode(), 200
        if self.remaining:
            self.remaining -= 1
            text, status = self.text, self.status
        if status == 599:
            raise httpx.RemoteProtocolError("cut")
        return httpx.Response(status, json={"choices": [{"text": text, "finish_reason": "length"}]})


async def tried(status: int, text: str) -> list[FaultRecord]:
    server = StruckServer(status, text)
    load = MixedLoad("http://server/v1", 1, httpx.MockTransport(server.handle))
    return await campaign(load, MINUTES, 1, server.strike)


@pytest.mark.parametrize(("status", "kind"), [(503, "HTTP 503"), (599, "RemoteProtocolError")])
def test_errors_are_counted_and_no_failure(status: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.faults.mixed_load.RETRY_S", 0.0)
    records = [record for record in asyncio.run(tried(status, "")) if record.tries]
    assert records
    assert all(record.answers[kind] == 3 * record.tries for record in records)
    assert all(record.answers["right"] >= len(forms(random.Random(1))) for record in records)
    assert not failures(records)


def test_a_wrong_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.faults.mixed_load.RETRY_S", 0.0)
    records = asyncio.run(tried(200, "another text"))
    assert sum(record.answers["wrong"] for record in records) == 3 * sum(record.tries for record in records)
    assert all("'another text'" in failure and "instead of" in failure for failure in failures(records))
    assert failures(records)


def test_equal_seeds_give_equal_requests() -> None:
    assert forms(random.Random(3)) == forms(random.Random(3)) != forms(random.Random(4))
