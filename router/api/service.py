"""The gRPC service `tandem.v1.Inference`: parses messages into a `ClientRequest` and sends answers as messages."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from router.access.client_call import served_call
from router.api.access.grpc_access import GrpcAccess
from router.api.client_gone import unless_gone
from router.api.grpc_chat.answer_chunks import AnswerChunks
from router.api.grpc_chat.conversation import conversation
from router.api.model_routes import installed_version
from router.config import RouterConfig
from router.requests.answer import AnswerChunk, Ending
from router.requests.answer_format import AnswerFormat
from router.requests.dispatch import Dispatcher
from router.requests.request import Admitted, ClientRequest, Options, Prompt
from router.requests.validation import RequestValidator
from router.text.request_items import check_template_kwargs_size
from router.text.request_reader import check_message_count
from router.text.token_scores import ScoredToken, TokenScore
from router.workers.adapter_calls import AdapterCalls
from vocabulary.grammar_process import GrammarKind
from wire import convert
from wire.errors import InvalidArgument, TandemError, Unavailable
from wire.generated.tandem.v1 import inference_pb2, types_pb2
from wire.rpc import values_of
from wire.tracing.request_trace import TRACEPARENT, only
from wire.tracing.timeline import Edge, EdgeStamp

_Context = grpc.aio.ServicerContext[Any, Any]
_M = TypeVar("_M", bound=Message)
_A = TypeVar("_A", types_pb2.LoadAdapterRequest, types_pb2.UnloadAdapterRequest)


@dataclass(frozen=True, slots=True)
class _Caller:
    """The caller of one gRPC method."""

    received: EdgeStamp
    tenant: str
    traceparent: str
    gone: asyncio.Future[None]
    """A future that is done once the call is over, whichever side ended it."""


class InferenceServicer:
    """Serves the client's gRPC methods.

    Each method takes the bytes of its request, so that a large one is parsed outside the event loop. Raises typed
    errors, which the server's interceptor turns into status codes. `GrpcAccess` has checked the caller before.
    """

    def __init__(self, config: RouterConfig, validator: RequestValidator, dispatcher: Dispatcher) -> None:
        self._config = config
        self._validator = validator
        self._dispatcher = dispatcher
        self._adapters = AdapterCalls(dispatcher.pool)
        self._started_unix_nanos = time.time_ns()

    def Generate(self, request: bytes, context: _Context) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Continue a prompt."""
        caller = self._caller(context)
        return self._answer(inference_pb2.GenerateRequest, request, partial(self._from_generate, caller), caller)

    def Chat(self, request: bytes, context: _Context) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Answer a conversation through the model's chat template."""
        caller = self._caller(context)
        return self._answer(inference_pb2.ChatRequest, request, partial(self._from_chat, caller), caller)

    async def Abort(self, request: bytes, _context: _Context) -> inference_pb2.AbortResponse:
        """Cancel a request by its client's id."""
        tenant = served_call().caller.tenant
        asked = await self._validator.reader.message(tenant, inference_pb2.AbortRequest, request, lambda each: each)
        if not asked.request_id:
            raise InvalidArgument("request_id", "is empty; name the request to abort")
        return inference_pb2.AbortResponse(found=self._dispatcher.abort(tenant, asked.request_id))

    async def GetModelInfo(self, _request: bytes, _context: _Context) -> inference_pb2.GetModelInfoResponse:
        """Return the facts of the served model; Unavailable until a worker has loaded it."""
        served = self._dispatcher.pool.model
        if served is None:
            message = "no worker has loaded the model yet; try again in a moment"
            raise Unavailable(message, retry_after_s=self._config.retry_after_s)
        return inference_pb2.GetModelInfoResponse(
            model=self._config.model_name,
            aliases=self._config.model_aliases,
            max_context=served.facts.max_context,
            vocab_size=served.facts.vocab_size,
            eos_token_ids=served.facts.eos_token_ids,
            dtype=served.facts.dtype,
            summary=served.facts.summary,
            adapters=map(convert.adapter_to_proto, served.facts.adapters),
        )

    async def GetServerInfo(self, _request: bytes, _context: _Context) -> inference_pb2.GetServerInfoResponse:
        """Return the router's version and mode, and the workers it sees."""
        return inference_pb2.GetServerInfoResponse(
            version=installed_version(),
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
                    pages_used=link.info.pages_total - link.state.pages_free,
                    pages_total=link.info.pages_total,
                    transport=link.info.transport,
                    device=link.info.device,
                    not_ready=link.info.not_ready,
                    warnings=link.info.warnings,
                    step_policy="" if link.info.assignment is None else link.info.assignment.steps,
                    closing="" if link.info.closing is None else link.info.closing.value,
                    draining=link.info.open is None or link.retired,
                    started_unix_nanos=link.info.started_unix_nanos,
                )
                for link in self._dispatcher.pool.links
            ],
        )

    async def LoadAdapter(self, request: bytes, _context: _Context) -> types_pb2.LoadAdapterResponse:
        """Load an adapter into every worker of the cluster."""
        asked = await self._of_operator(types_pb2.LoadAdapterRequest, request)
        adapter = await self._adapters.load(asked.lora_name, asked.lora_path)
        return types_pb2.LoadAdapterResponse(adapter=convert.adapter_to_proto(adapter))

    async def UnloadAdapter(self, request: bytes, _context: _Context) -> types_pb2.UnloadAdapterResponse:
        """Unload an adapter."""
        asked = await self._of_operator(types_pb2.UnloadAdapterRequest, request)
        await self._adapters.unload(asked.lora_name)
        return types_pb2.UnloadAdapterResponse()

    async def GetLoads(self, _request: bytes, _context: _Context) -> inference_pb2.GetLoadsResponse:
        """Return the numbers of waiting and running requests."""
        return inference_pb2.GetLoadsResponse(waiting=self._dispatcher.waiting, running=self._dispatcher.running)

    async def _of_operator(self, kind: type[_A], request: bytes) -> _A:
        call = served_call()
        asked = await self._validator.reader.message(call.caller.tenant, kind, request, lambda each: each)
        call.model = asked.lora_name
        return asked

    def _caller(self, context: _Context) -> _Caller:
        gone = asyncio.get_running_loop().create_future()
        # A cancelled call may leave its generator suspended until it is collected; the context's callback runs at once.
        context.add_done_callback(lambda _: _set_once(gone))  # type: ignore[arg-type]  # the stubs name a class, not a protocol
        tenant = served_call().caller.tenant
        return _Caller(EdgeStamp.now(Edge.RECEIVED), tenant, _traceparent(context), gone)

    def _from_generate(self, caller: _Caller, request: inference_pb2.GenerateRequest) -> ClientRequest:
        prompt: Prompt = request.text
        if request.WhichOneof("prompt") == "token_ids":
            self._validator.check_token_count(len(request.token_ids.ids))
            prompt = tuple(request.token_ids.ids)
        return self._client_request(caller, request, prompt)

    def _from_chat(self, caller: _Caller, request: inference_pb2.ChatRequest) -> ClientRequest:
        check_message_count(len(request.messages), self._config.max_messages)
        return self._client_request(
            caller, request, conversation(request, self._variables(request.chat_template_kwargs))
        )

    def _client_request(
        self, caller: _Caller, request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest, prompt: Prompt
    ) -> ClientRequest:
        options = _options(request.options)
        return ClientRequest(
            request.request_id, request.model, prompt, options, caller.received, caller.tenant, caller.traceparent
        )

    def _variables(self, text: str) -> dict[str, Any]:
        """Reads the variables of the chat template; their size is checked before they are read."""
        check_template_kwargs_size(len(text.encode()), self._config.max_template_kwargs_bytes)
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidArgument("chat_template_kwargs", f"is not valid JSON ({error})") from error
        if not isinstance(value, dict):
            raise InvalidArgument("chat_template_kwargs", "must be a JSON object")
        return value

    async def _admitted(
        self, kind: type[_M], request: bytes, build: Callable[[_M], ClientRequest], tenant: str
    ) -> Admitted:
        try:
            client_request = await self._validator.reader.message(tenant, kind, request, build)
        except TandemError as error:
            self._dispatcher.metrics.refused("", error)
            raise
        return await self._validator.admit(client_request)

    async def _answer(
        self, kind: type[_M], request: bytes, build: Callable[[_M], ClientRequest], caller: _Caller
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        admitted = await unless_gone(self._admitted(kind, request, build, caller.tenant), caller.gone)
        choices = self._dispatcher.submit(admitted)
        parts = AnswerChunks(admitted.syntax)
        caller.gone.add_done_callback(lambda _: choices.close())
        scored = admitted.sampling.prompt_logprobs is not None
        try:
            while not choices.over:
                index, event = await choices.next()
                if scored and (found := choices.answers[0].scores_of_prompt()) is not None:
                    scores = await self._validator.spelled(caller.tenant, admitted.prompt_token_ids, found)
                    # There may be hundreds of thousands of scores, which would hold up the event loop.
                    prompt = await asyncio.to_thread(_prompt_scores, scores)
                    yield inference_pb2.GenerateResponse(request_id=choices.request_id, prompt=prompt)
                scored = False
                for made in _messages(parts, index, event):
                    yield inference_pb2.GenerateResponse(request_id=choices.request_id, index=index, **made)
        finally:
            choices.close()


def add_inference(servicer: InferenceServicer | GrpcAccess, server: grpc.aio.Server) -> None:
    """Register this servicer's methods as `tandem.v1.Inference` on a server."""
    service = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for each in service.methods:
        make = grpc.unary_stream_rpc_method_handler if each.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[each.name] = make(
            getattr(servicer, each.name), response_serializer=GetMessageClass(each.output_type).SerializeToString
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _traceparent(context: _Context) -> str:
    return only(values_of(context.invocation_metadata(), TRACEPARENT))


def _messages(parts: AnswerChunks, index: int, event: AnswerChunk | Ending) -> Iterator[dict[str, Any]]:
    if isinstance(event, AnswerChunk):
        scores = [_score(score) for score in event.scores]
        fields = parts.feed(index, event.text)
        yield {"chunk": inference_pb2.Chunk(**fields, token_ids=event.token_ids, logprobs=scores)}
        return
    if rest := parts.finish(index):
        yield {"chunk": inference_pb2.Chunk(**rest)}
    complete = _complete(event)
    complete.finish_reason = parts.finish_reason(index, complete.finish_reason)
    yield {"complete": complete}


def _score(score: TokenScore) -> inference_pb2.TokenScore:
    return inference_pb2.TokenScore(chosen=_scored(score.chosen), top=[_scored(token) for token in score.top])


def _prompt_scores(scores: Sequence[TokenScore]) -> inference_pb2.PromptScores:
    first = inference_pb2.TokenScore(chosen=_scored(replace(scores[0].chosen, logprob=0.0)))
    return inference_pb2.PromptScores(tokens=[first, *map(_score, scores[1:])])


def _scored(token: ScoredToken) -> inference_pb2.ScoredToken:
    return inference_pb2.ScoredToken(token_id=token.token_id, utf8=token.utf8, logprob=token.logprob)


def _complete(ending: Ending) -> inference_pb2.Complete:
    return inference_pb2.Complete(
        finish_reason=convert.finish_to_proto(ending.finish_reason),
        matched_stop=ending.matched_stop,
        prompt_tokens=ending.prompt_tokens,
        completion_tokens=ending.completion_tokens,
        cached_tokens=ending.cached_tokens,
        timeline=convert.timeline_to_proto(ending.timeline),
    )


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
        min_tokens=message.min_tokens,
        include_stop=message.include_stop_str_in_output,
        speculate=message.speculate if message.HasField("speculate") else True,
        ignore_eos=message.ignore_eos,
        frequency_penalty=given("frequency_penalty"),
        presence_penalty=given("presence_penalty"),
        repetition_penalty=given("repetition_penalty"),
        logprobs=given("logprobs"),
        prompt_logprobs=given("prompt_logprobs"),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        add_special_tokens=given("add_special_tokens"),
        truncate_prompt_tokens=given("truncate_prompt_tokens"),
        priority=message.priority,
        slo_class=message.slo_class,
        cache_salt=message.cache_salt,
        answer_format=_answer_format(message.response_format) if message.HasField("response_format") else None,
    )


def _answer_format(message: inference_pb2.ResponseFormat) -> AnswerFormat:
    kind = message.WhichOneof("format")
    if kind is None:
        raise InvalidArgument("response_format", "has no format; leave it out for any text")
    value = tuple(message.choice.texts) if kind == GrammarKind.CHOICE else getattr(message, kind)
    return AnswerFormat(f"response_format.{kind}", GrammarKind(kind), value)
