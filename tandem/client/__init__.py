"""The Python client of the gRPC service `tandem.v1.Inference`, synchronous and for asyncio.

    from tandem.client import Client

    with Client("127.0.0.1:50051") as client:
        print(client.chat("Why is the sky blue?", max_tokens=100).text)
        for chunk in client.stream_chat("And at night?"):
            print(chunk.text, end="", flush=True)

Every failure raises a `TandemError`. The `retry_after_s` of `ResourceExhausted` and `Unavailable` is the number of
seconds to wait before the next attempt.
"""

from tandem.client.answers import Answer, Chunk, FinishReason, Prompt, ScoredToken, Tokens, TokenScore, ToolCallDelta
from tandem.client.async_client import AsyncClient, AsyncStream
from tandem.client.connection import Tls
from tandem.client.requests import (
    ChatOptions,
    GenerateOptions,
    Message,
    Options,
    Request,
    Tool,
    ToolCall,
    chat_request,
    generate_request,
)
from tandem.client.sync_client import Client, Stream
from tandem.protocol.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    RateLimited,
    ResourceExhausted,
    TandemError,
    Unauthenticated,
    Unavailable,
)

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "ChatOptions",
    "Chunk",
    "Client",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "FinishReason",
    "GenerateOptions",
    "Internal",
    "InvalidArgument",
    "Message",
    "NotFound",
    "Options",
    "PermissionDenied",
    "Prompt",
    "RateLimited",
    "Request",
    "ResourceExhausted",
    "ScoredToken",
    "Stream",
    "TandemError",
    "Tls",
    "TokenScore",
    "Tokens",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Unauthenticated",
    "Unavailable",
    "chat_request",
    "generate_request",
]
