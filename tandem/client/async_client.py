"""The client for asyncio, with the same methods as the synchronous client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc.aio

from tandem.client.answers import Answer, AnswerCollector, Chunk, Tokens, tokens_of
from tandem.client.connection import PYTHON, Connection, Tls, Wording
from tandem.client.requests import (
    ChatOptions,
    Conversation,
    GenerateOptions,
    Prompt,
    Prompts,
    Request,
    chat_request,
    detokenize_request,
    generate_request,
    prompt_count,
    tokenize_request,
)
from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc


class AsyncStream:
    """The chunks of the answers to one request, in the order of arrival. Leaving its context cancels the request."""

    def __init__(self, connection: Connection, call: Any, collector: AnswerCollector) -> None:
        self._connection = connection
        self._call = call
        self._collector = collector

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield the chunks that have not been read yet. Raises the request's TandemError if it fails."""
        try:
            async for message in self._call:
                chunk = self._collector.add(message)
                if chunk is not None:
                    yield chunk
        except grpc.aio.AioRpcError as error:
            raise self._connection.error(error, begun=self._collector.begun) from None

    async def answers(self) -> list[Answer]:
        """Read the rest of the stream, and return the complete answers, `n` for each prompt."""
        async for _ in self:
            pass
        return self._collector.answers()

    async def answer(self) -> Answer:
        """Read the rest of the stream, and return the first answer."""
        return (await self.answers())[0]

    def close(self) -> None:
        """Cancel the request if it is still running."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """A client of the router at `address` (host:port), for use in one event loop.

    Call `close`, or use the client as a context manager.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        tls: Tls | None = None,
        timeout_s: float | None = None,
        wording: Wording = PYTHON,
    ) -> None:
        """Store the connection's settings; the first call connects.

        `timeout_s` is the deadline of each call in seconds; None = no deadline. Raises InvalidArgument for a malformed
        key, or for a file of `tls` that cannot be read.
        """
        self.address = address
        self._connection = Connection(address, api_key, tls, wording)
        self._timeout_s = timeout_s
        self._channel: grpc.aio.Channel | None = None

    async def chat(self, conversation: Conversation, **options: Unpack[ChatOptions]) -> Answer:
        """Return the answer to a conversation; see `stream_chat`."""
        return await self.stream_chat(conversation, **options).answer()

    def stream_chat(self, conversation: Conversation, **options: Unpack[ChatOptions]) -> AsyncStream:
        """Stream the answers to a conversation.

        Raises InvalidArgument for a value that cannot be sent. Reading the stream raises all other errors.
        """
        return self.stream(chat_request(conversation, **options))

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Answer:
        """Return the answer to a prompt, which is a text or token ids to continue; see `stream_generate`."""
        return await self.stream_generate(prompt, **options).answer()

    async def generate_all(self, prompts: Prompts, **options: Unpack[GenerateOptions]) -> list[Answer]:
        """Return the answers to all prompts, `n` per prompt, in the prompts' order; see `stream_generate`."""
        return await self.stream_generate(prompts, **options).answers()

    def stream_generate(self, prompts: Prompts, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Stream the answers to one or several prompts, each a text or token ids. Raises as `stream_chat` does."""
        return self.stream(generate_request(prompts, **options))

    def stream(self, request: Request, *, timeout_s: float | None = None) -> AsyncStream:
        """Stream the answers to a request built by `generate_request` or `chat_request`, which may be sent repeatedly.

        `timeout_s` is the deadline of this call in seconds; None = the client's. Reading the stream raises all errors.
        """
        method = self._stub.Chat if isinstance(request, inference_pb2.ChatRequest) else self._stub.Generate
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        call = method(request, metadata=self._connection.metadata, timeout=timeout_s)
        return AsyncStream(self._connection, call, AnswerCollector(prompt_count(request), max(1, request.options.n)))

    async def tokenize(self, text: str, *, token_strs: bool = False, **options: Unpack[GenerateOptions]) -> Tokens:
        """Return the token ids that `generate` would use for a text with the same options.

        `token_strs` also requests the text of each token.
        """
        request = tokenize_request(generate_request(text, **options), token_strs=token_strs)
        return tokens_of(await self._unary(self._stub.Tokenize, request))

    async def tokenize_chat(
        self, conversation: Conversation, *, token_strs: bool = False, **options: Unpack[ChatOptions]
    ) -> Tokens:
        """Return the token ids that `chat` would use for a conversation with the same options.

        `token_strs` also requests the text of each token.
        """
        request = tokenize_request(chat_request(conversation, **options), token_strs=token_strs)
        return tokens_of(await self._unary(self._stub.Tokenize, request))

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """Return the text of token ids, including special tokens."""
        answer: inference_pb2.DetokenizeResponse = await self._unary(
            self._stub.Detokenize, detokenize_request(token_ids, model)
        )
        return answer.text

    async def tokenizer_info(self) -> dict[str, Any]:
        """Return the tokenizer's class, chat template and special tokens."""
        answer: inference_pb2.GetTokenizerInfoResponse = await self._unary(
            self._stub.GetTokenizerInfo, inference_pb2.GetTokenizerInfoRequest()
        )
        info: dict[str, Any] = json.loads(answer.info)
        return info

    async def abort(self, request_id: str) -> bool:
        """Cancel a request, and return True if it was running."""
        request = inference_pb2.AbortRequest(request_id=request_id)
        answer: inference_pb2.AbortResponse = await self._unary(self._stub.Abort, request)
        return answer.found

    async def model(self) -> inference_pb2.GetModelInfoResponse:
        """Return the properties of the served model. Raises Unavailable if no worker has loaded the model."""
        response: inference_pb2.GetModelInfoResponse = await self._unary(
            self._stub.GetModelInfo, inference_pb2.GetModelInfoRequest()
        )
        return response

    async def server(self) -> inference_pb2.GetServerInfoResponse:
        """Return the state of the router and its workers. Raises PermissionDenied for a tenant's key."""
        response: inference_pb2.GetServerInfoResponse = await self._unary(
            self._stub.GetServerInfo, inference_pb2.GetServerInfoRequest()
        )
        return response

    async def loads(self) -> inference_pb2.GetLoadsResponse:
        """Return the numbers of waiting and running requests. Raises PermissionDenied for a tenant's key."""
        response: inference_pb2.GetLoadsResponse = await self._unary(
            self._stub.GetLoads, inference_pb2.GetLoadsRequest()
        )
        return response

    async def close(self) -> None:
        """Close the connection and cancel the requests that are still running."""
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _stub(self) -> Any:
        """The gRPC stub, whose channel belongs to the event loop of the first call."""
        if self._channel is None:
            self._channel = self._connection.open_async()
        return inference_pb2_grpc.InferenceStub(self._channel)

    async def _unary(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, metadata=self._connection.metadata, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._connection.error(error) from None
