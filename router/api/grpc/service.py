"""The gRPC service `tandem.v1.Inference`: parses messages into `ClientRequest`s and sends answers as messages."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from router.access.client_call import served_call
from router.api.client_gone import unless_gone
from router.api.grpc.access import GrpcAccess
from router.api.grpc.calls import CallFacts, CallParser, InferenceCall
from router.api.grpc.responses import Responses
from router.api.prompt_replies import PromptReplies
from router.config import RouterConfig
from router.requests.dispatch import Dispatcher
from router.requests.request import Admitted
from router.requests.validation import RequestValidator
from router.workers.adapter_calls import AdapterCalls
from tandem.net.rpc import values_of
from tandem.protocol import conversion
from tandem.protocol.errors import InvalidArgument, TandemError, Unavailable, clipped
from tandem.protocol.generated.tandem.v1 import inference_pb2, types_pb2
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.lifecycle.request_trace import TRACEPARENT, only
from tandem.version import installed_version

_Context = grpc.aio.ServicerContext[Any, Any]
_M = TypeVar("_M", bound=Message)
_A = TypeVar("_A", types_pb2.LoadAdapterRequest, types_pb2.UnloadAdapterRequest)


@dataclass(frozen=True, slots=True)
class _Caller:
    """The tenant and other properties of one gRPC call; the work for the call is cancelled once `gone` is done."""

    facts: CallFacts
    gone: asyncio.Future[None]
    """A future that is done once the call has ended, whether the client or the router ended it."""


class InferenceServicer:
    """Serves the gRPC methods of clients, on the event loop.

    Each method takes its request as bytes, so that a large one can be parsed outside the event loop. A method with a
    stream of responses writes them to its context. Methods raise typed errors, which the server's interceptor turns
    into status codes. `GrpcAccess` checks the caller before a method is called.
    """

    def __init__(self, config: RouterConfig, validator: RequestValidator, dispatcher: Dispatcher) -> None:
        self._config = config
        self._validator = validator
        self._dispatcher = dispatcher
        self._adapters = AdapterCalls(dispatcher.pool)
        self._parser = CallParser(config, validator)
        self._started_unix_nanos = time.time_ns()

    async def Generate(self, request: bytes, context: _Context) -> None:
        """Stream the answers to a text prompt or to token ids."""
        await self._answer(inference_pb2.GenerateRequest, request, self._parser.generate, context)

    async def Chat(self, request: bytes, context: _Context) -> None:
        """Stream the answers to a conversation, which the model's chat template renders."""
        await self._answer(inference_pb2.ChatRequest, request, self._parser.chat, context)

    async def Tokenize(self, request: bytes, context: _Context) -> inference_pb2.TokenizeResponse:
        """Turn a text or a conversation into token ids."""
        caller = self._caller(context)
        ids, spelled, max_context = await unless_gone(self._tokenized(request, caller), caller.gone)
        return inference_pb2.TokenizeResponse(token_ids=ids, token_strs=spelled or (), max_context=max_context)

    async def Detokenize(self, request: bytes, context: _Context) -> inference_pb2.DetokenizeResponse:
        """Turn token ids into text."""
        caller = self._caller(context)
        return inference_pb2.DetokenizeResponse(text=await unless_gone(self._text(request, caller), caller.gone))

    async def GetTokenizerInfo(self, _request: bytes, _context: _Context) -> inference_pb2.GetTokenizerInfoResponse:
        """Return the tokenizer class, the chat template and the special tokens, as JSON."""
        return inference_pb2.GetTokenizerInfoResponse(info=json.dumps(dict(self._validator.tokenizer_facts)))

    async def Abort(self, request: bytes, _context: _Context) -> inference_pb2.AbortResponse:
        """Abort a request of the caller's tenant by the id that the client gave it."""
        tenant = served_call().caller.tenant
        message = await self._validator.reader.message(tenant, inference_pb2.AbortRequest, request, lambda read: read)
        if not message.request_id:
            raise InvalidArgument("request_id", "is empty; name the request to abort")
        served_call().request_id = clipped(message.request_id)
        return inference_pb2.AbortResponse(found=self._dispatcher.abort(tenant, message.request_id))

    async def GetModelInfo(self, _request: bytes, _context: _Context) -> inference_pb2.GetModelInfoResponse:
        """Return the served model's properties. Raises Unavailable until a worker has loaded the model."""
        served = self._dispatcher.pool.model
        if served is None:
            message = "no worker has loaded the model yet; try again in a moment"
            raise Unavailable(message, retry_after_s=self._config.retry_after_s)
        return inference_pb2.GetModelInfoResponse(
            model=self._config.served.name,
            aliases=self._config.served.names[1:],
            max_context=served.facts.max_context,
            vocab_size=served.facts.vocab_size,
            eos_token_ids=served.facts.eos_token_ids,
            dtype=served.facts.dtype,
            summary=served.facts.summary,
            adapters=[conversion.to_proto(adapter, types_pb2.AdapterFacts) for adapter in served.facts.adapters],
        )

    async def GetServerInfo(self, _request: bytes, _context: _Context) -> inference_pb2.GetServerInfoResponse:
        """Return the router's version and mode, and the state of its workers."""
        return inference_pb2.GetServerInfoResponse(
            version=installed_version(),
            started_unix_nanos=self._started_unix_nanos,
            mode=self._dispatcher.pool.mode,
            degraded=self._dispatcher.degraded,
            workers=[
                inference_pb2.WorkerStatus(
                    worker_id=link.info.peer.worker_id,
                    role=link.info.role.value,
                    incarnation=link.info.peer.incarnation,
                    address=link.info.address,
                    connected=link.connected and not link.silent,
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
                    kv_tiers=link.info.kv_tiers,
                )
                for link in self._dispatcher.pool.links
            ],
        )

    async def LoadAdapter(self, request: bytes, _context: _Context) -> types_pb2.LoadAdapterResponse:
        """Load an adapter into every worker of the cluster."""
        message = await self._of_operator(types_pb2.LoadAdapterRequest, request)
        adapter = await self._adapters.load(message.lora_name, message.lora_path)
        return types_pb2.LoadAdapterResponse(adapter=conversion.to_proto(adapter, types_pb2.AdapterFacts))

    async def UnloadAdapter(self, request: bytes, _context: _Context) -> types_pb2.UnloadAdapterResponse:
        """Unload an adapter from every worker of the cluster."""
        message = await self._of_operator(types_pb2.UnloadAdapterRequest, request)
        await self._adapters.unload(message.lora_name)
        return types_pb2.UnloadAdapterResponse()

    async def GetLoads(self, _request: bytes, _context: _Context) -> inference_pb2.GetLoadsResponse:
        """Return the numbers of waiting and running requests."""
        return inference_pb2.GetLoadsResponse(waiting=self._dispatcher.waiting, running=self._dispatcher.running)

    async def _of_operator(self, kind: type[_A], request: bytes) -> _A:
        call = served_call()
        message = await self._validator.reader.message(call.caller.tenant, kind, request, lambda read: read)
        call.model = message.lora_name
        return message

    def _caller(self, context: _Context) -> _Caller:
        gone = asyncio.get_running_loop().create_future()
        context.add_done_callback(lambda _: _set_once(gone))  # type: ignore[arg-type]  # the stubs name a class, not a protocol
        tenant = served_call().caller.tenant
        return _Caller(CallFacts(EventTime.now(LifecycleEvent.RECEIVED), tenant, _traceparent(context)), gone)

    async def _tokenized(self, request: bytes, caller: _Caller) -> tuple[list[int], list[str] | None, int]:
        parse = partial(self._parser.tokenize, caller.facts)
        wanted, token_texts = await self._validator.reader.message(
            caller.facts.tenant, inference_pb2.TokenizeRequest, request, parse
        )
        return await self._validator.tokenize(wanted, token_texts=token_texts)

    async def _text(self, request: bytes, caller: _Caller) -> str:
        def parse(message: inference_pb2.DetokenizeRequest) -> tuple[str, tuple[int, ...]]:
            if not message.token_ids:
                raise InvalidArgument("token_ids", "is empty; send at least one token id")
            return message.model, tuple(message.token_ids)

        tenant = caller.facts.tenant
        model, ids = await self._validator.reader.message(tenant, inference_pb2.DetokenizeRequest, request, parse)
        return await self._validator.detokenize(tenant, model, ids)

    async def _admitted(
        self, kind: type[_M], request: bytes, parse: Callable[[_M], InferenceCall], tenant: str
    ) -> tuple[InferenceCall, list[Admitted]]:
        try:
            call = await self._validator.reader.message(tenant, kind, request, parse)
        except TandemError as error:
            self._dispatcher.metrics.refused("", error)
            raise
        return call, await self._validator.admit_all(call.requests)

    async def _answer(
        self,
        kind: type[_M],
        request: bytes,
        parse: Callable[[CallFacts, _M], InferenceCall],
        context: _Context,
    ) -> None:
        caller = self._caller(context)
        facts = caller.facts
        admitting = self._admitted(kind, request, partial(parse, facts), facts.tenant)
        call, admitted = await unless_gone(admitting, caller.gone)
        choices = self._dispatcher.submit(*admitted)
        caller.gone.add_done_callback(lambda _: choices.close())
        prompts = PromptReplies(call.prompts, self._validator, call.requests, admitted, choices)
        try:
            await Responses(call, admitted, choices, prompts).send(context.write)
        finally:
            choices.close()


def add_inference(servicer: InferenceServicer | GrpcAccess, server: grpc.aio.Server) -> None:
    """Register the methods of `servicer` as `tandem.v1.Inference` on `server`; they get undecoded bytes as requests."""
    service = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(
            getattr(servicer, method.name), response_serializer=GetMessageClass(method.output_type).SerializeToString
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _traceparent(context: _Context) -> str:
    return only(values_of(context.invocation_metadata(), TRACEPARENT))
