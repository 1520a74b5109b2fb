"""A channel to a router's client port that sends an API key with every call."""

from typing import Any

import grpc
import grpc.aio

from tandem.net.rpc import AUTHORIZATION, CHANNEL_OPTIONS


def keyed_channel(address: str, api_key: str = "") -> grpc.aio.Channel:
    """Opens a channel whose calls have `api_key` as a bearer token; "" = none."""
    interceptors = [_SendKeyUnary(api_key), _SendKeyStream(api_key)] if api_key else []
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS, interceptors=interceptors)


class _SendKeyUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, key: str) -> None:
        self._key = key

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_key(client_call_details, self._key), request)


class _SendKeyStream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, key: str) -> None:
        self._key = key

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_key(client_call_details, self._key), request)


def _with_key(details: grpc.aio.ClientCallDetails, key: str) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), (AUTHORIZATION, f"Bearer {key}"))
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )
