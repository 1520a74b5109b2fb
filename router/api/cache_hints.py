"""The fields by which clients of each API say how long a prompt's KV will be of use, and which session it belongs to.

They change no answer: KV is cached without them, and a hint is bounded by the tenant's share of each worker's cache
(`tandem/engine/cache/eviction_order.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from router.api.body import Body
from router.requests.validation import SESSION_MAX
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import CACHE_RETENTION_MAX_S

SESSION_HEADER = "x-session-id"
"""The header with the id of the client's session, for any API; it takes precedence over `prompt_cache_key`."""
_SECONDS = {"s": 1, "m": 60, "h": 3600}
BREAKPOINTS_MAX = 4
"""Maximum number of `cache_control` fields in a request; Anthropic's limit."""


class CacheControl(Body):
    """Anthropic's hint that the prompt up to here will be sent again within `ttl` after each use."""

    inert = frozenset({"scope"})
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = Field(None, description="5m if it is left out.")

    @property
    def retention_s(self) -> float:
        """The time to live in seconds."""
        return seconds_of(self.ttl or "5m")


def retention_of(controls: Iterable[CacheControl | None]) -> float:
    """Return the longest time to live of all `cache_control` fields of a request in seconds; 0 if it has none.

    Raises InvalidArgument if there are too many.
    """
    given = [control for control in controls if control is not None]
    if len(given) > BREAKPOINTS_MAX:
        raise InvalidArgument("cache_control", f"is given {len(given)} times, the limit is {BREAKPOINTS_MAX}")
    return max((control.retention_s for control in given), default=0.0)


class PromptCacheOptions(Body):
    """OpenAI's newer hint; the mode is ignored, because all prompts are cached."""

    inert = frozenset({"mode"})
    ttl: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}[smh]$")] | None = Field(
        None, description="A number and s, m or h; at most 24h."
    )


class PromptCaching(Body):
    """OpenAI's hints, which chat completions, completions and responses share."""

    prompt_cache_key: Annotated[str, Field(json_schema_extra={"maxLength": SESSION_MAX})] | None = Field(
        None, description="An id that the requests of one session have in common."
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None, description="24h: the prompt's KV is kept in preference to other KV of the tenant."
    )
    prompt_cache_options: PromptCacheOptions | None = None

    def cache_hints(self) -> dict[str, Any]:
        """Return the options of a request that the hints set. Raises InvalidArgument for a time that is too long."""
        retention_s = seconds_of("24h") if self.prompt_cache_retention == "24h" else 0.0
        if self.prompt_cache_options is not None and self.prompt_cache_options.ttl is not None:
            retention_s = max(retention_s, seconds_of(self.prompt_cache_options.ttl))
            if retention_s > CACHE_RETENTION_MAX_S:
                raise InvalidArgument("prompt_cache_options.ttl", "is longer than 24h, the limit")
        return {"session": self.prompt_cache_key or "", "cache_retention_s": retention_s}


def seconds_of(text: str) -> float:
    """Return the seconds of a time such as 5m or 1h."""
    matched = re.fullmatch(r"(\d+)([smh])", text)
    assert matched is not None
    return float(matched[1]) * _SECONDS[matched[2]]
