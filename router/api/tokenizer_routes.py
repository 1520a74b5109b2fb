"""The HTTP routes to the tokenizer, as in vLLM: `/tokenize`, `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

from router.access.client_call import served_call
from router.api.client_gone import unless_gone
from router.api.http_body import disconnected, read_body
from router.api.json_fields import UnknownFields
from router.api.openai.models.requests import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from router.api.openai.requests import body_fields, conversation, encoding
from router.api.openapi.json_body import json_body
from router.api.unserved_fields import CHAT_UNSERVED, INERT
from router.config import RouterConfig
from router.requests.request import ClientRequest, Conversation, Options
from router.requests.validation import RequestValidator
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.lifecycle.timeline import Edge, EdgeStamp

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _TokenizeCall:
    request: ClientRequest
    spell: bool


def add_tokenizer(app: FastAPI, config: RouterConfig, validator: RequestValidator) -> None:
    """Add the three routes to `app`; their work shares threads, limits and fair order with requests for answers."""

    async def parsed(request: Request, parse: Callable[[bytes], _T]) -> tuple[str, _T]:
        tenant = served_call().caller.tenant
        body = await read_body(request, config.listeners.max_request_bytes)
        return tenant, await validator.reader.json(tenant, body, parse)

    async def tokenize(request: Request) -> JSONResponse:
        tenant, call = await parsed(request, lambda body: _tokenize_call(body, strict=config.strict_requests))
        ids, spelled, context = await _unless_client_gone(
            request,
            validator.tokenize(replace(call.request, tenant=tenant), spell=call.spell),
        )
        found = {"count": len(ids), "max_model_len": context, "tokens": ids}
        return JSONResponse(found if spelled is None else {**found, "token_strs": spelled})

    async def detokenize(request: Request) -> JSONResponse:
        tenant, (model, ids) = await parsed(request, lambda body: _detokenize_call(body, strict=config.strict_requests))
        return JSONResponse({"prompt": await _unless_client_gone(request, validator.detokenize(tenant, model, ids))})

    async def tokenizer_info() -> JSONResponse:
        return JSONResponse(dict(validator.tokenizer_facts))

    bodies = json_body(TokenizeTextRequest, TokenizeChatRequest)
    app.add_api_route("/tokenize", tokenize, methods=["POST"], openapi_extra=bodies)
    app.add_api_route("/detokenize", detokenize, methods=["POST"], openapi_extra=json_body(DetokenizeRequest))
    app.add_api_route("/tokenizer_info", tokenizer_info, methods=["GET", "HEAD"])


async def _unless_client_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        return await unless_gone(work, gone)
    finally:
        gone.cancel()


def _tokenize_call(body: bytes, *, strict: bool) -> _TokenizeCall:
    fields = body_fields(body, UnknownFields(strict=strict))
    spell = fields.boolean("return_token_strs")
    model = fields.text("model") or ""
    text = fields.text("prompt")
    options = Options(**encoding(fields))
    prompt: str | Conversation
    if text is None:
        fields.refuse(CHAT_UNSERVED)
        prompt = conversation(fields)
    else:
        prompt = text
    fields.drop(INERT)
    fields.end()
    received = EdgeStamp.now(Edge.RECEIVED)
    return _TokenizeCall(ClientRequest("", model, prompt, options, received), spell)


def _detokenize_call(body: bytes, *, strict: bool) -> tuple[str, tuple[int, ...]]:
    fields = body_fields(body, UnknownFields(strict=strict))
    model, ids = fields.text("model") or "", fields.integers("tokens")
    if not ids:
        raise InvalidArgument("tokens", "is missing or empty; send a list of token ids")
    fields.end()
    return model, ids
