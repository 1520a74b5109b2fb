"""The HTTP routes by which operators load and unload LoRA adapters, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import PlainTextResponse

from router.access.client_call import served_call
from router.api.body import Body, UnknownFields, read_body
from router.api.fields import Name
from router.api.http import HttpCalls
from router.api.http_access import LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH
from router.api.openapi import json_body
from router.api.route_groups import Group
from router.workers.adapter_calls import AdapterCalls
from tandem.protocol.lifecycle.events import EventTime


class UnloadLoraAdapterRequest(Body):
    """The body of /v1/unload_lora_adapter."""

    lora_name: Annotated[Name, Field(description="The model name by which requests choose the adapter.")]


class LoadLoraAdapterRequest(UnloadLoraAdapterRequest):
    """The body of /v1/load_lora_adapter."""

    lora_path: Annotated[Name, Field(description="Its folder, an absolute path on each worker's host.")]


def add_adapters(app: FastAPI, calls: HttpCalls, adapters: AdapterCalls) -> None:
    """Add the routes that load and unload adapters to `app`; `HttpAccess` admits only operators."""

    async def load(request: Request) -> PlainTextResponse:
        """Load an adapter into every worker; only operators may call it."""
        body = await calls.read(request, _parse_load)
        served_call().model = body.lora_name
        await adapters.load(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(request: Request) -> PlainTextResponse:
        """Unload an adapter from every worker; only operators may call it."""
        body = await calls.read(request, _parse_unload)
        served_call().model = body.lora_name
        await adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    for path, answer, body in (
        (LOAD_ADAPTER_PATH, load, LoadLoraAdapterRequest),
        (UNLOAD_ADAPTER_PATH, unload, UnloadLoraAdapterRequest),
    ):
        app.add_api_route(
            path,
            answer,
            methods=["POST"],
            response_class=PlainTextResponse,
            openapi_extra=json_body(body),
            tags=[Group.MODELS],
        )


def _parse_load(data: bytes, _received: EventTime, *, strict: bool) -> LoadLoraAdapterRequest:
    return read_body(LoadLoraAdapterRequest, data, UnknownFields(strict=strict))


def _parse_unload(data: bytes, _received: EventTime, *, strict: bool) -> UnloadLoraAdapterRequest:
    return read_body(UnloadLoraAdapterRequest, data, UnknownFields(strict=strict))
