"""The harness of `python -m tests.faults`, with a server that fails and errs when it is struck."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from tests.faults.__main__ import campaign, failures
from tests.faults.fault_kinds import FAULTS, Fault, Scene
from tests.faults.mixed_load import FaultRecord, Judge, MixedLoad, forms

MINUTES = 0.001
STRUCK = 3
"""The replies that are wrong after a strike."""


class StruckServer:
    """Answers with the fields of the request; after a strike, three requests with another status and text."""

    def __init__(self, status: int, text: str) -> None:
        self.status, self.text = status, text
        self.remaining = 0

    async def strike(self, scene: Scene) -> bool:
        self.remaining += STRUCK
        while self.remaining:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        return True

    async def handle(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        body, status = json.loads(request.content), 200
        text = str(body["prompt"] if "prompt" in body else body["messages"])
        if self.remaining:
            self.remaining -= 1
            text, status = self.text, self.status
        if status == 599:
            raise httpx.RemoteProtocolError("cut")
        tokens = [7] * body["max_tokens"]
        choice = {"text": text, "finish_reason": "length", "token_ids": tokens, "prompt_token_ids": [1]}
        reply = {"choices": [choice]}
        if body.get("stream") and status == 200:
            return httpx.Response(200, text=f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n")
        return httpx.Response(status, json=reply)


def tried(
    status: int, text: str, judge: Judge | None = None, may_cause: tuple[str, ...] = ()
) -> tuple[FaultRecord, list[FaultRecord]]:
    """Return the record of the fault, and all records."""

    async def run() -> list[FaultRecord]:
        server = StruckServer(status, text)
        load = MixedLoad("http://server/v1", 1, transport=httpx.MockTransport(server.handle), judge=judge)
        scene: Any = Scene(None, random.Random(1))
        fault = Fault("strike", "server", "", server.strike, may_cause)
        return await campaign(scene, load, [fault], MINUTES, apart_s=0.01)

    records = asyncio.run(run())
    assert records[0].tries
    return records[0], records


@pytest.fixture(autouse=True)
def _retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.faults.mixed_load.RETRY_S", 0.0)


@pytest.mark.parametrize(("status", "kind"), [(503, "HTTP 503"), (599, "RemoteProtocolError")])
@pytest.mark.parametrize("may_cause", [True, False])
def test_errors_are_no_wrong_answers_but_count_unless_the_fault_may_cause_them(
    status: int, kind: str, may_cause: bool
) -> None:
    record, records = tried(status, "", may_cause=(kind,) if may_cause else ("another",))
    assert record.answers[kind] == STRUCK * record.tries
    assert not failures(records)
    assert sum(one.answers["right"] for one in records) >= len(forms(random.Random(1))) - 2
    assert record.not_saved == (0 if may_cause else STRUCK * record.tries)


def test_a_wrong_answer_is_a_failure() -> None:
    record, records = tried(200, "another text")
    wrong = record.answers["wrong"]
    assert wrong + record.answers["left"] >= STRUCK * record.tries > 0
    assert wrong == len(failures(records))
    assert all("'another text'" in failure and "instead of" in failure for failure in failures(records))


def test_an_answer_that_rounding_explains_is_a_near_tie() -> None:
    judged: list[str] = []

    def judge(body: dict[str, Any], prompt: list[int], number: int, token_ids: list[int]) -> bool:
        judged.append(body.get("prompt", ""))
        assert (prompt, number, len(token_ids)) == ([1], 0, body["max_tokens"])
        return True

    record, records = tried(200, "another text", judge)
    assert record.answers["near tie"] == len(judged) > 0
    assert not failures(records)


def test_equal_seeds_give_equal_requests() -> None:
    assert forms(random.Random(3)) == forms(random.Random(3)) != forms(random.Random(4))


def test_each_fault_has_its_needs_and_a_name_of_its_own() -> None:
    bare: Any = Scene(None, random.Random(1))
    tried_without = {name for name, fault in FAULTS.items() if not fault.missing(bare)}
    assert {"kill-decode", "suspend-router", "limit-memory-of-prefill"} <= tried_without
    assert not {"fill-disk", "cut-network", "flip-in-transfer", "expire-certificate"} & tried_without
    assert all(name == fault.name for name, fault in FAULTS.items())
