"""The router's client for the commands."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from tandem.net.rpc import ERROR_CODE, error_of, open_client_channel
from tandem.net.security.client_tls import NO_TLS, ClientTls
from tandem.protocol import conversion
from tandem.protocol.errors import InvalidArgument, TandemError, Unauthenticated, Unavailable
from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc
from tandem.protocol.lifecycle.timeline import Timeline
from tandem.protocol.messages import FinishReason
from tandem.settings.parsing import check_key

MAX_TOKENS_MAX = 2**31 - 1
SEED_MAX = 2**64 - 1
TEMPERATURE_MAX = 100.0
TRANSPORT_FAILURES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN)
"""Status codes that gRPC itself reports for a peer that is unreachable, does not respond or disconnects."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a command, greedy by default; None = the router's default."""

    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Validates the parameters; InvalidArgument names the option and its limits, which are the router's."""
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_TOKENS_MAX:
            raise InvalidArgument("--max-tokens", f"{self.max_tokens} is not between 1 and {MAX_TOKENS_MAX}")
        if not 0 <= self.temperature <= TEMPERATURE_MAX:
            raise InvalidArgument("--temperature", f"{self.temperature:g} is not between 0 and {TEMPERATURE_MAX:g}")
        if self.seed is not None and not 0 <= self.seed <= SEED_MAX:
            raise InvalidArgument("--seed", f"{self.seed} is not between 0 and {SEED_MAX}")

    def options(self) -> inference_pb2.GenerationOptions:
        """Returns the parameters as a wire message."""
        return inference_pb2.GenerationOptions(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer; token fields are counts."""

    text: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class ServerView:
    """A router's report of itself, its load and its workers."""

    info: inference_pb2.GetServerInfoResponse
    loads: inference_pb2.GetLoadsResponse
    model: inference_pb2.GetModelInfoResponse


class RouterClient:
    """Calls to one router. Every failure is a typed error that names the router."""

    def __init__(self, address: str, api_key: str = "", tls: ClientTls = NO_TLS) -> None:
        """Creates a client; InvalidArgument for a key that no call could carry, an empty one is none."""
        if api_key:
            check_key("--api-key", api_key)
        self.address = address
        self._api_key = api_key
        self._tls = tls.credentials(), tls.target_name

    async def complete(self, text: str, sampling: Sampling, on_text: Callable[[str], None]) -> Answer:
        """Continues `text`; `on_text` is called with each piece as it comes."""
        request = inference_pb2.GenerateRequest(text=text, options=sampling.options())
        return await self._stream("Generate", request, on_text)

    async def chat(
        self, messages: Sequence[tuple[str, str]], sampling: Sampling, on_text: Callable[[str], None]
    ) -> Answer:
        """Answers a conversation of (role, content) pairs; `on_text` is called with each piece as it comes."""
        conversation = [inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
        request = inference_pb2.ChatRequest(messages=conversation, options=sampling.options())
        return await self._stream("Chat", request, on_text)

    async def view(self, timeout_s: float = 5.0) -> ServerView:
        """Returns the router's report. Unavailable if it does not respond in time."""
        async with open_client_channel(self.address, self._api_key, *self._tls) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            try:
                return ServerView(
                    await stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=timeout_s),
                    await stub.GetLoads(inference_pb2.GetLoadsRequest(), timeout=timeout_s),
                    await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=timeout_s),
                )
            except grpc.aio.AioRpcError as error:
                raise self._typed(error) from None

    async def model(self, timeout_s: float = 5.0) -> inference_pb2.GetModelInfoResponse:
        """Returns the router's model, which keys of every role may read. Unavailable if it does not respond in time."""
        async with open_client_channel(self.address, self._api_key, *self._tls) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            try:
                found: inference_pb2.GetModelInfoResponse = await stub.GetModelInfo(
                    inference_pb2.GetModelInfoRequest(), timeout=timeout_s
                )
            except grpc.aio.AioRpcError as error:
                raise self._typed(error) from None
            return found

    async def _stream(self, method: str, request: Any, on_text: Callable[[str], None]) -> Answer:
        pieces: list[str] = []
        async with open_client_channel(self.address, self._api_key, *self._tls) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            call: AsyncIterator[inference_pb2.GenerateResponse] = getattr(stub, method)(request)
            complete, reasons = inference_pb2.Complete(), False
            try:
                async for message in call:
                    if message.HasField("chunk"):
                        # Reasoning is shown and is no part of the answer.
                        on_text(_shown(message.chunk, after_reasoning=reasons and not pieces))
                        reasons = reasons or bool(message.chunk.reasoning)
                        pieces += [message.chunk.text] if message.chunk.text else []
                    else:
                        complete = message.complete
            except grpc.aio.AioRpcError as error:
                raise self._typed(error, begun=bool(pieces) or reasons) from None
        return Answer(
            "".join(pieces),
            FinishReason(complete.finish_reason) if complete.finish_reason else None,
            complete.prompt_tokens,
            complete.completion_tokens,
            conversion.from_proto(complete.timeline, Timeline),
        )

    def _typed(self, error: grpc.aio.AioRpcError, *, begun: bool = False) -> TandemError:
        """Returns the router's own error where it sent one, and otherwise a sentence in place of the transport's."""
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            wrong = "does not accept this API key" if self._api_key else "asks for an API key"
            return Unauthenticated(
                f"the router at {self.address} {wrong}; give --api-key or --api-key-file (TANDEM_API_KEY)"
            )
        own_error = any(key == ERROR_CODE for key, _ in error.trailing_metadata() or ())
        if own_error or error.code() not in TRANSPORT_FAILURES:
            return error_of(error, f"the router at {self.address}")
        if begun:
            return Unavailable(f"lost the router at {self.address} before the answer's end; is `tandem up` running?")
        return Unavailable(f"cannot reach the router at {self.address}; is `tandem up` running there?")


def _shown(chunk: inference_pb2.Chunk, *, after_reasoning: bool) -> str:
    """Returns a chunk's text for the terminal: reasoning and content, with an empty line between."""
    divider = "\n\n" if chunk.text and (after_reasoning or chunk.reasoning) else ""
    return f"{chunk.reasoning}{divider}{chunk.text}"
