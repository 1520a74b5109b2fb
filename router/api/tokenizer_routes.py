"""The HTTP routes of the tokenizer: vLLM's `/tokenize`, `/detokenize` and `/tokenizer_info`, Anthropic's count_tokens.

These calls share the tokenizer threads, the limits and the fair order of tenants with generation requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

from router.access.client_call import served_call
from router.api.anthropic.api_key import MESSAGES_PATH
from router.api.anthropic.body import CountTokensRequest
from router.api.anthropic.request import parse_count
from router.api.body import UnknownFields, parse_object, read_body, read_object
from router.api.call import ApiCall
from router.api.http import HttpCalls
from router.api.openai.bodies import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from router.api.openai.requests import conversation, encoding
from router.api.openapi import json_body
from router.api.route_groups import Group
from router.requests.request import ClientRequest, Options, Prompt
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.lifecycle.events import EventTime

Tokenized = tuple[list[int], list[str] | None, int]
"""A tuple: token ids, the text of each token (None if not requested), and the model's context in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenizeCall(ApiCall):
    token_texts: bool


@dataclass(frozen=True, slots=True)
class _TokenizerRoutes:
    calls: HttpCalls

    async def tokenize(self, request: Request) -> JSONResponse:
        """Return the token ids of a text or a conversation."""
        _, (ids, spelled, context) = await self.calls.served(
            request, _parse_tokenize, lambda call: self._tokenized(request, call, token_texts=call.token_texts)
        )
        reply = {"count": len(ids), "max_model_len": context, "tokens": ids}
        return JSONResponse(reply if spelled is None else {**reply, "token_strs": spelled})

    async def detokenize(self, request: Request) -> JSONResponse:
        """Return the text of token ids."""
        validator, tenant = self.calls.validator, served_call().caller.tenant
        _, text = await self.calls.served(
            request, _parse_detokenize, lambda body: validator.detokenize(tenant, body.model or "", tuple(body.tokens))
        )
        return JSONResponse({"prompt": text})

    async def info(self) -> JSONResponse:
        """Return the tokenizer class, the chat template and the special tokens."""
        return JSONResponse(dict(self.calls.validator.tokenizer_facts))

    async def count(self, request: Request) -> JSONResponse:
        """Return the number of tokens of a conversation (Anthropic's count_tokens)."""
        call, (ids, _, _) = await self.calls.served(
            request, parse_count, lambda call: self._tokenized(request, call, token_texts=False)
        )
        return JSONResponse({"input_tokens": len(ids)}, headers=self.calls.ignored_header(call))

    async def _tokenized(self, request: Request, call: ApiCall, *, token_texts: bool) -> Tokenized:
        (wanted,) = self.calls.requests_of(request, call)
        try:
            return await self.calls.validator.tokenize(wanted, token_texts=token_texts)
        except InvalidArgument as error:
            raise call.names.error(error) from None


def add_tokenizer(app: FastAPI, calls: HttpCalls) -> None:
    """Add the tokenizer's routes to `app`."""
    routes = _TokenizerRoutes(calls)
    for path, answer, body, group in (
        ("/tokenize", routes.tokenize, json_body(TokenizeTextRequest, TokenizeChatRequest), Group.TOKENS),
        ("/detokenize", routes.detokenize, json_body(DetokenizeRequest), Group.TOKENS),
        (f"{MESSAGES_PATH}/count_tokens", routes.count, json_body(CountTokensRequest), Group.ANTHROPIC),
    ):
        app.add_api_route(path, answer, methods=["POST"], openapi_extra=body, tags=[group])
    app.add_api_route("/tokenizer_info", routes.info, methods=["GET", "HEAD"], tags=[Group.TOKENS])


def _parse_tokenize(data: bytes, received: EventTime, *, strict: bool) -> _TokenizeCall:
    unknown, value = UnknownFields(strict=strict), parse_object(data)
    body: TokenizeTextRequest | TokenizeChatRequest
    prompt: Prompt
    if value.get("prompt") is None:
        body = read_object(TokenizeChatRequest, value, unknown)
        prompt = conversation(body)
    else:
        body = read_object(TokenizeTextRequest, value, unknown)
        prompt = body.prompt
    request = ClientRequest("", body.model or "", prompt, Options(**encoding(body)), received)
    return _TokenizeCall(requests=(request,), token_texts=bool(body.return_token_strs))


def _parse_detokenize(data: bytes, _received: EventTime, *, strict: bool) -> DetokenizeRequest:
    return read_body(DetokenizeRequest, data, UnknownFields(strict=strict))
