"""Requests of every form over HTTP and gRPC, and an oracle that has the right answer to each.

The right answers are those of the undisturbed cluster. Another answer is right only if rounding explains each of its
tokens (`tests/near_ties.py`); it is then counted as a near tie.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.faults.streams import DEADLINE_S

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
SENTENCES = "The sea is wide. The old ship sails at night. A lamp is lit on the pier. Rain falls on the roof. "
RETRY_S = 0.5
ANSWER_TOKENS = 24
LEAVES_AFTER = 4
"""Events of a stream after which a client leaves."""
DEADLINE_SHORT_S = 2.0
RIGHT, NEAR_TIE, WRONG, NO_END, LEFT, DEADLINE = "right", "near tie", "wrong", "no end", "left", "deadline"
ENDED_WELL = {RIGHT, NEAR_TIE, LEFT, DEADLINE}
ADAPTER = "sailor"
"""The name of the adapter, in clusters that have one."""

Judge = Callable[[dict[str, Any], list[int], int, list[int]], bool]
"""Returns True if rounding explains an answer: of a body, its prompt, the number of the answer, and its tokens."""


@dataclass(frozen=True, slots=True)
class Form:
    """One form of request; its client sends the bodies in turn."""

    path: str
    bodies: tuple[dict[str, Any], ...]
    leaves: bool = False
    """True if the client leaves before the end of the answer."""
    deadline_s: float = 0.0
    """The deadline of each request, which is sent over gRPC; 0 = that of `streams.py`, at which a request hangs."""


def forms(rng: random.Random, adapter: str = "") -> dict[str, Form]:
    """Return the forms by name; one has the adapter of this name, if there is any."""
    words = SENTENCES.split()

    def text(count: int) -> str:
        return " ".join(rng.choice(words) for _ in range(count))

    def chat(**fields: Any) -> Form:
        messages = [{"role": "user", "content": text(12)}]
        return Form(
            "chat/completions", ({"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0} | fields,)
        )

    def body(words: int, **fields: Any) -> dict[str, Any]:
        fixed = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {"prompt": text(words)} | fixed | fields

    def completion(words: int = 20, **fields: Any) -> Form:
        return Form("completions", (body(words, **fields),))

    def sampled(**fields: Any) -> Form:
        return completion(temperature=0.8, seed=rng.randrange(1 << 30), **fields)

    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    made = {
        "greedy": completion(),
        "greedy stream": completion(stream=True, max_tokens=3 * ANSWER_TOKENS),
        "long prompts": Form("completions", tuple(body(400, stream=True) for _ in range(4))),
        "sampled with a seed": sampled(),
        "sampled stream": sampled(stream=True),
        "penalties": sampled(frequency_penalty=0.5, repetition_penalty=1.2),
        "two answers": sampled(n=2),
        "log probabilities": completion(logprobs=2),
        "stop string": completion(stop=[" the"], ignore_eos=False),
        "no drafts": completion(speculate=False),
        "priority": completion(priority=-5),
        "JSON schema": chat(response_format=schema),
        "required tool": chat(tools=[TOOL], tool_choice="required"),
        "client that leaves": Form("completions", (body(20, stream=True, max_tokens=200),), leaves=True),
        "deadline": Form("completions", (body(20, max_tokens=100),), deadline_s=DEADLINE_SHORT_S),
    }
    return made | ({"adapter": completion(model=adapter)} if adapter else {})


@dataclass(slots=True)
class Reply:
    """What a client got: the choices that must be the same in every reply to a request, and the gaps of a stream."""

    choices: list[dict[str, Any]] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    gap_s: float = 0.0
    """The longest time between two events of a stream after the first."""
    error: str = ""

    def add(self, body: dict[str, Any]) -> None:
        """Add an event of a stream, or a whole reply."""
        for choice in body["choices"]:
            number = choice.get("index", 0)
            self.choices += [
                {"text": "", "token_ids": [], "tokens": [], "calls": []} for _ in range(len(self.choices), number + 1)
            ]
            one, message = self.choices[number], choice.get("message") or {}
            one["text"] += choice.get("text") or message.get("content") or ""
            one["calls"] += [call["function"] for call in message.get("tool_calls") or ()]
            one["token_ids"] += choice.get("token_ids") or ()
            one["tokens"] += (choice.get("logprobs") or {}).get("tokens") or ()
            one["finish_reason"] = choice.get("finish_reason") or one.get("finish_reason")
            self.prompt = choice.get("prompt_token_ids") or self.prompt

    def begins(self, whole: list[dict[str, Any]]) -> bool:
        """Return True if this is the beginning of a right answer."""
        tokens = [choice["token_ids"] for choice in self.choices]
        return all(own == right["token_ids"][: len(own)] for own, right in zip(tokens, whole, strict=False))


@dataclass(slots=True)
class FaultRecord:
    """All tries of one fault, and the ends of the requests that ran during one."""

    name: str
    may_cause: tuple[str, ...] = ()
    """The errors with which requests that it interrupts may end."""
    tries: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """Answers by their kind, and errors by their status or type."""
    details: list[str] = field(default_factory=list)
    """The wrong answers, and those without an end."""
    messages: dict[str, str] = field(default_factory=dict)
    """The newest message of each kind of error."""
    gaps_s: list[float] = field(default_factory=list)
    """The longest gap of each stream."""

    @property
    def not_saved(self) -> int:
        """The number of requests that ended with an error that the fault may not cause."""
        ends = {*ENDED_WELL, WRONG, NO_END, *self.may_cause}
        return sum(count for kind, count in self.answers.items() if kind not in ends)


@dataclass(slots=True)
class _Try:
    record: FaultRecord
    began_s: float
    ended_s: float = math.inf


class MixedLoad:
    """One client for each form of request, which sends it over and over."""

    def __init__(
        self,
        url: str,
        seed: int,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        trust: ssl.SSLContext | bool = True,
        judge: Judge | None = None,
        adapter: str = "",
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        """`transport` replaces the network in unit tests; without a `judge` no answer but the first is right.

        Without a `channel` to the router's gRPC port no request has a deadline.
        """
        # Connections are not kept: after a fault, a request would fail on one that was opened before.
        self._transport = transport or httpx.AsyncHTTPTransport(
            verify=trust, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._http = httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, transport=self._transport)
        made = forms(random.Random(seed), adapter)
        self._forms = {name: form for name, form in made.items() if channel is not None or not form.deadline_s}
        self._channel = channel
        self._judge = judge
        self._right: dict[tuple[str, int], Reply] = {}
        self._tries: list[_Try] = []
        self.ended: Counter[str] = Counter()
        """All requests, by their ends."""
        self.undisturbed = FaultRecord("none")
        """The requests that ran during no fault."""
        self._stopping = False
        self._newest_right_s = dict.fromkeys(self._forms, 0.0)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ended_well(self) -> int:
        """The number of requests that ended as they should."""
        return sum(self.ended[kind] for kind in ENDED_WELL)

    @property
    def clients(self) -> int:
        """The number of clients: one for each form of request."""
        return len(self._forms)

    async def start(self) -> None:
        """Asks the undisturbed cluster once for each request, and starts the clients."""
        for name, form in self._forms.items():
            for number, body in enumerate(form.bodies):
                reply = await self._http.post(form.path, json=body | {"stream": False})
                assert reply.status_code == 200, (name, reply.text)
                whole = Reply()
                whole.add(reply.json())
                self._right[name, number] = whole
        self._tasks = [asyncio.ensure_future(self._client(name)) for name in self._forms]

    def struck(self, record: FaultRecord) -> Callable[[], None]:
        """Count a try that begins now; the function that is returned ends it, when the cluster is as before."""
        record.tries += 1
        one = _Try(record, time.monotonic())
        self._tries.append(one)

        def over() -> None:
            one.ended_s = time.monotonic()

        return over

    async def recovered(self) -> None:
        """Wait until each client has a right answer to a request that it sends from now on."""
        since_s = time.monotonic()
        async with asyncio.timeout(2 * DEADLINE_S):
            while min(self._newest_right_s.values()) < since_s:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Let the clients end their requests."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    async def _client(self, name: str) -> None:
        turn = 0
        while not self._stopping:
            sent_s, number = time.monotonic(), turn % len(self._forms[name].bodies)
            kind, gap_s, detail = await self._ask(name, number)
            self.ended[kind] += 1
            for record in self._causes(sent_s, kind):
                record.answers[kind] += 1
                record.gaps_s += [gap_s] if gap_s else []
                if kind in {WRONG, NO_END}:
                    record.details.append(f"{name}: {detail}")
                elif detail:
                    record.messages[kind] = f"{name}: {detail}"
            if kind in ENDED_WELL:
                self._newest_right_s[name] = sent_s
                turn += 1
            else:
                await asyncio.sleep(RETRY_S)

    def _causes(self, sent_s: float, kind: str) -> list[FaultRecord]:
        """Return the records of all faults during a request that ended well; of another, that of the likeliest cause.

        That is the newest fault that may cause such an end, or else the newest one.
        """
        during = [one.record for one in self._tries if one.ended_s >= sent_s] or [self.undisturbed]
        if kind in ENDED_WELL:
            return list({id(record): record for record in during}.values())
        return ([record for record in during if kind in record.may_cause] or during)[-1:]

    async def _ask(self, name: str, number: int) -> tuple[str, float, str]:
        """Send one request; return how it ended, the longest gap of a stream, and what is wrong with the answer."""
        form, right = self._forms[name], self._right[name, number].choices
        try:
            reply, status = await (self._generate(name, number) if form.deadline_s else self._reply(form, number))
        except httpx.TimeoutException:
            return NO_END, 0.0, f"no end within {DEADLINE_S:g} s"
        except httpx.HTTPError as error:
            return type(error).__name__, 0.0, str(error)
        if status not in {"", DEADLINE}:
            return status, 0.0, reply.error
        if (form.leaves or status == DEADLINE) and reply.begins(right):
            return status or LEFT, reply.gap_s, ""
        explained = reply.choices != right and await self._explained(form.bodies[number], reply)
        kind = RIGHT if reply.choices == right else NEAR_TIE if explained else WRONG
        return kind, reply.gap_s, f"{reply.choices} instead of {right}" if kind == WRONG else ""

    async def _reply(self, form: Form, number: int) -> tuple[Reply, str]:
        """Return a reply, and the kind of its error or ""."""
        body, reply = form.bodies[number], Reply()
        if not body.get("stream"):
            whole = await self._http.post(form.path, json=body)
            if whole.status_code != 200:
                return Reply(error=whole.text), f"HTTP {whole.status_code}"
            reply.add(whole.json())
            return reply, ""
        events, newest_s = 0, 0.0
        async with self._http.stream("POST", form.path, json=body) as response:
            if response.status_code != 200:
                return Reply(error=(await response.aread()).decode()), f"HTTP {response.status_code}"
            async for event in _events(response):
                if "error" in event:
                    return Reply(error=json.dumps(event)), "error in a stream"
                now_s, events = time.monotonic(), events + 1
                reply.gap_s = max(reply.gap_s, now_s - newest_s if newest_s else 0.0)
                newest_s = now_s
                reply.add(event)
                if form.leaves and events == LEAVES_AFTER:
                    break
        return reply, ""

    async def _generate(self, name: str, number: int) -> tuple[Reply, str]:
        """Return the reply over gRPC to a greedy request with a deadline, and the kind of its error or ""."""
        form, right = self._forms[name], self._right[name, number]
        assert self._channel is not None
        tokens = form.bodies[number]["max_tokens"]
        options = inference_pb2.GenerationOptions(max_tokens=tokens, temperature=0, ignore_eos=True)
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=right.prompt), options=options)
        one = {**right.choices[0], "token_ids": []}
        reply = Reply([one], right.prompt)
        stub: Any = inference_pb2_grpc.InferenceStub(self._channel)
        try:
            async for message in stub.Generate(request, timeout=form.deadline_s):
                one["token_ids"] += message.chunk.token_ids
        except grpc.aio.AioRpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            reply.error = error.details() or ""
            return reply, DEADLINE if late else f"gRPC {error.code().name}"
        return reply, ""

    async def _explained(self, body: dict[str, Any], reply: Reply) -> bool:
        if self._judge is None or not reply.prompt:
            return False
        whole = [choice for choice in reply.choices if len(choice["token_ids"]) == body["max_tokens"]]
        if len(whole) < len(reply.choices):
            return False
        judge = self._judge
        return all(
            [
                await asyncio.to_thread(judge, body, reply.prompt, number, one["token_ids"])
                for number, one in enumerate(whole)
            ]
        )


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream. Raises httpx.RemoteProtocolError if it ends without its last one."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise httpx.RemoteProtocolError("the stream ended without [DONE]")
