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
from router.api.openai_fields import CHAT_UNSERVED, INERT
from router.api.openai_requests import body_fields, conversation
from router.config import RouterConfig
from router.requests.request import ClientRequest, Conversation, Options
from router.requests.validation import RequestValidator
from wire.errors import InvalidArgument
from wire.tracing.timeline import Edge, EdgeStamp

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _TokenizeCall:
    request: ClientRequest
    add_special_tokens: bool
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
            validator.tokenize(
                replace(call.request, tenant=tenant), add_special_tokens=call.add_special_tokens, spell=call.spell
            ),
        )
        found = {"count": len(ids), "max_model_len": context, "tokens": ids}
        return JSONResponse(found if spelled is None else {**found, "token_strs": spelled})

    async def detokenize(request: Request) -> JSONResponse:
        tenant, (model, ids) = await parsed(request, lambda body: _detokenize_call(body, strict=config.strict_requests))
        return JSONResponse({"prompt": await _unless_client_gone(request, validator.detokenize(tenant, model, ids))})

    async def tokenizer_info() -> JSONResponse:
        return JSONResponse(dict(validator.tokenizer_facts))

    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])
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
    prompt: str | Conversation
    if text is None:
        # As in a chat completion, the template brings the special tokens.
        fields.refuse(CHAT_UNSERVED)
        prompt, add_special_tokens = conversation(fields), False
    else:
        prompt, add_special_tokens = text, fields.boolean("add_special_tokens", absent=True)
    fields.drop(INERT)
    fields.end()
    received = EdgeStamp.now(Edge.RECEIVED)
    return _TokenizeCall(ClientRequest("", model, prompt, Options(), received), add_special_tokens, spell)


def _detokenize_call(body: bytes, *, strict: bool) -> tuple[str, tuple[int, ...]]:
    fields = body_fields(body, UnknownFields(strict=strict))
    model, ids = fields.text("model") or "", fields.integers("tokens")
    if not ids:
        raise InvalidArgument("tokens", "is missing or empty; send a list of token ids")
    fields.end()
    return model, ids
