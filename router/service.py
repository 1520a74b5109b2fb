"""The gRPC door: `tandem.v1.Inference`. From messages to an `Ask`, from an answer to messages."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import grpc.aio

from router.admission import Admission, check_size
from router.answer import Ending, Piece
from router.chat_template import ChatTurn
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.request import Ask, Conversation, Options, Prompt
from router.tenants import tenant_of
from router.token_scores import ScoredToken, TokenScore
from wire import convert
from wire.errors import InvalidArgument, Unavailable
from wire.generated.tandem.v1 import inference_pb2, inference_pb2_grpc
from wire.request_trace import TRACEPARENT
from wire.rpc import AUTHORIZATION
from wire.timeline import Edge, EdgeStamp

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Answers clients. Raises typed errors, which the server's interceptor turns into status codes."""

    def __init__(self, config: RouterConfig, admission: Admission, dispatcher: Dispatcher) -> None:
        self._config = config
        self._admission = admission
        self._dispatcher = dispatcher
        self._started_unix_nanos = time.time_ns()

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        received = EdgeStamp.now(Edge.RECEIVED)
        self._check_size(request.ByteSize())
        asked = request.request_id, request.model, _prompt(request), _options(request.options)
        return self._answer(Ask(*asked, received, self._tenant(context), _metadata(context, TRACEPARENT)), context)

    def Chat(
        self, request: inference_pb2.ChatRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        received = EdgeStamp.now(Edge.RECEIVED)
        self._check_size(request.ByteSize())
        turns = tuple(ChatTurn(message.role, message.content) for message in request.messages)
        asked = request.request_id, request.model, Conversation(turns), _options(request.options)
        return self._answer(Ask(*asked, received, self._tenant(context), _metadata(context, TRACEPARENT)), context)

    async def Abort(self, request: inference_pb2.AbortRequest, context: _Context) -> inference_pb2.AbortResponse:
        if not request.request_id:
            raise InvalidArgument("request_id", "is empty; name the request to abort")
        return inference_pb2.AbortResponse(found=self._dispatcher.abort(self._tenant(context), request.request_id))

    async def GetModelInfo(
        self, _request: inference_pb2.GetModelInfoRequest, _context: _Context
    ) -> inference_pb2.GetModelInfoResponse:
        served = self._dispatcher.pool.model
        if served is None:
            message = "no worker has loaded the model yet; try again in a moment"
            raise Unavailable(message, retry_after_s=self._config.retry_after_s)
        return inference_pb2.GetModelInfoResponse(
            model=self._config.model_name,
            max_context=served.facts.max_context,
            vocab_size=served.facts.vocab_size,
            eos_token_ids=served.facts.eos_token_ids,
            dtype=served.facts.dtype,
        )

    async def GetServerInfo(
        self, _request: inference_pb2.GetServerInfoRequest, _context: _Context
    ) -> inference_pb2.GetServerInfoResponse:
        return inference_pb2.GetServerInfoResponse(
            version=_version(),
            started_unix_nanos=self._started_unix_nanos,
            mode=self._dispatcher.pool.mode,
            workers=[
                inference_pb2.WorkerStatus(
                    worker_id=link.info.peer.worker_id,
                    role=link.info.role.value,
                    incarnation=link.info.peer.incarnation,
                    address=link.info.address,
                    connected=link.connected,
                    requests=len(link.request_ids),
                    pages_used=link.books.pages_used,
                    pages_total=link.info.pages_total,
                    transport=link.info.transport,
                    device=link.info.device,
                    not_ready=link.info.not_ready,
                    warnings=link.info.warnings,
                    step_policy="" if link.info.duty is None else link.info.duty.steps,
                    closing="" if link.info.closing is None else link.info.closing.value,
                    draining=link.info.open is None or link.retired,
                )
                for link in self._dispatcher.pool.links
            ],
        )

    async def GetLoads(
        self, _request: inference_pb2.GetLoadsRequest, _context: _Context
    ) -> inference_pb2.GetLoadsResponse:
        return inference_pb2.GetLoadsResponse(waiting=self._dispatcher.waiting, running=self._dispatcher.running)

    def _check_size(self, size: int) -> None:
        try:
            check_size(size, self._config.max_request_bytes)
        except InvalidArgument as error:
            self._dispatcher.metrics.refused("", error)
            raise

    def _tenant(self, context: _Context) -> str:
        return tenant_of(_metadata(context, AUTHORIZATION), self._config.api_keys)

    async def _answer(self, ask: Ask, context: _Context) -> AsyncIterator[inference_pb2.GenerateResponse]:
        choices = self._dispatcher.submit(await self._admission.admit(ask))
        # A cancelled call may leave this generator suspended until it is collected; the context tells at once.
        context.add_done_callback(lambda _: choices.close())  # type: ignore[arg-type]  # the stubs name a class, not a protocol
        try:
            while not choices.over:
                index, event = await choices.next()
                made = _complete(event) if isinstance(event, Ending) else _chunk(event)
                yield inference_pb2.GenerateResponse(request_id=choices.request_id, index=index, **made)
        finally:
            choices.close()


def _metadata(context: _Context, key: str) -> str:
    """ "" if the call has none."""
    return str(dict(context.invocation_metadata() or ()).get(key, ""))


def _chunk(piece: Piece) -> dict[str, Any]:
    chunk = inference_pb2.Chunk(
        text=piece.text, token_ids=piece.token_ids, logprobs=[_score(score) for score in piece.scores]
    )
    return {"chunk": chunk}


def _score(score: TokenScore) -> inference_pb2.TokenScore:
    return inference_pb2.TokenScore(chosen=_scored(score.chosen), top=[_scored(token) for token in score.top])


def _scored(token: ScoredToken) -> inference_pb2.ScoredToken:
    return inference_pb2.ScoredToken(token_id=token.token_id, utf8=token.utf8, logprob=token.logprob)


def _complete(ending: Ending) -> dict[str, Any]:
    complete = inference_pb2.Complete(
        finish_reason=convert.finish_to_proto(ending.finish_reason),
        matched_stop=ending.matched_stop,
        prompt_tokens=ending.prompt_tokens,
        completion_tokens=ending.completion_tokens,
        cached_tokens=ending.cached_tokens,
        timeline=convert.timeline_to_proto(ending.timeline),
    )
    return {"complete": complete}


def _prompt(request: inference_pb2.GenerateRequest) -> Prompt:
    if request.WhichOneof("prompt") == "token_ids":
        return tuple(request.token_ids.ids)
    return request.text


def _options(message: inference_pb2.GenerationOptions) -> Options:
    def given(name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    return Options(
        max_tokens=given("max_tokens"),
        temperature=given("temperature"),
        top_k=given("top_k"),
        top_p=given("top_p"),
        min_p=given("min_p"),
        seed=given("seed"),
        n=given("n"),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        frequency_penalty=given("frequency_penalty"),
        presence_penalty=given("presence_penalty"),
        repetition_penalty=given("repetition_penalty"),
        logprobs=given("logprobs"),
        priority=message.priority,
        slo_class=message.slo_class,
        cache_salt=message.cache_salt,
    )


def _version() -> str:
    try:
        return version("tandem")
    except PackageNotFoundError:
        return "0+source"
