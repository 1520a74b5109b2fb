"""The HTTP routes by which operators load and unload adapters (LoRA), as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field
from starlette.responses import PlainTextResponse

from router.access.client_call import served_call
from router.api.access.http_access import LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH
from router.api.http_body import read_body
from router.api.json_fields import UnknownFields
from router.api.openai.requests import body_fields
from router.api.openapi.json_body import json_body
from router.config import RouterConfig
from router.requests.validation import RequestValidator
from router.workers.adapter_calls import AdapterCalls
from tandem.protocol.errors import InvalidArgument


class LoadLoraAdapterRequest(BaseModel):
    """The body of /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1, description="The model name by which requests choose the adapter.")
    lora_path: str = Field(min_length=1, description="Its folder, an absolute path on each worker's host.")


class UnloadLoraAdapterRequest(BaseModel):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1, description="The adapter's model name.")


def add_adapters(app: FastAPI, config: RouterConfig, validator: RequestValidator, adapters: AdapterCalls) -> None:
    """Add both routes to `app`; `HttpAccess` lets operators in alone."""

    async def texts(request: Request, *names: str) -> Sequence[str]:
        call = served_call()
        body = await read_body(request, config.listeners.max_request_bytes)
        found = await validator.reader.json(
            call.caller.tenant, body, lambda body: _texts(body, names, strict=config.strict_requests)
        )
        call.model = found[0]
        return found

    async def load(request: Request) -> PlainTextResponse:
        name, path = await texts(request, "lora_name", "lora_path")
        await adapters.load(name, path)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(request: Request) -> PlainTextResponse:
        (name,) = await texts(request, "lora_name")
        await adapters.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    for path, answer, body in (
        (LOAD_ADAPTER_PATH, load, LoadLoraAdapterRequest),
        (UNLOAD_ADAPTER_PATH, unload, UnloadLoraAdapterRequest),
    ):
        app.add_api_route(
            path, answer, methods=["POST"], response_class=PlainTextResponse, openapi_extra=json_body(body)
        )


def _texts(body: bytes, names: Sequence[str], *, strict: bool) -> list[str]:
    """Return these fields of a body; InvalidArgument names one that is missing, empty or no string."""
    fields = body_fields(body, UnknownFields(strict=strict))
    found = []
    for name in names:
        text = fields.text(name)
        if not text:
            raise InvalidArgument(name, "is missing or empty; send a string")
        found.append(text)
    fields.end()
    return found
