"""The quota of one tenant in one router: requests per minute and tokens per minute, with a token bucket for each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tandem.protocol.errors import RateLimited

QUOTA_HEADERS = tuple(
    f"x-ratelimit-{value}-{kind}" for kind in ("requests", "tokens") for value in ("limit", "remaining", "reset")
)
"""The response headers for keys with quotas, as in OpenAI's API."""
_MINUTE_S = 60.0


class Bucket:
    """A token bucket whose capacity is one minute's limit; it refills continuously and may be overdrawn."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        """`clock` returns the time in seconds."""
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_s = clock()

    @property
    def level(self) -> float:
        """The amount that is left; negative if the bucket is overdrawn."""
        now = self._clock()
        gained = (now - self._filled_s) * self.per_minute / _MINUTE_S
        self._level = min(float(self.per_minute), self._level + gained)
        self._filled_s = now
        return self._level

    def take(self, amount: int) -> None:
        """Take `amount` from the bucket, even if it holds less."""
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        """Return the time until the bucket holds `level`, in seconds; 0 if it holds `level` now."""
        return max(0.0, level - self.level) * _MINUTE_S / self.per_minute


class Quota:
    """The remaining quota of a tenant. `Callers` own it; all calls are on the event loop.

    A request is admitted while both buckets hold at least 1. The quota is charged 1 request on admission, the prompt's
    tokens when the request is queued, and the answer's tokens as they are sent. So no request is too large for a quota,
    and requests in flight may overdraw the token bucket; further requests are rejected until the bucket holds at least
    1 again.
    """

    def __init__(self, requests: int, tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`requests` and `tokens` are limits per minute; 0 = no limit."""
        self._requests = Bucket(requests, clock) if requests else None
        self._tokens = Bucket(tokens, clock) if tokens else None

    def admit(self) -> None:
        """Charge one request to the quota.

        If the quota is used up, raises RateLimited with the time until a request will be admitted.
        """
        for bucket, kind in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket is not None and (wait_s := bucket.seconds_until(1.0)):
                raise RateLimited(
                    f"the quota of this key, {bucket.per_minute} {kind} a minute, is used up; "
                    f"try again in {math.ceil(wait_s)} s",
                    retry_after_s=wait_s,
                )
        if self._requests is not None:
            self._requests.take(1)

    def spend(self, tokens: int) -> None:
        """Charge `tokens` tokens of a prompt or an answer to the quota."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def headers(self) -> dict[str, str]:
        """Return OpenAI's rate limit headers: limit, remaining amount, and time until the quota is full (like 2m0s)."""
        headers: dict[str, str] = {}
        for bucket, kind in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level)))
                headers[f"x-ratelimit-reset-{kind}"] = _duration(bucket.seconds_until(bucket.per_minute))
        return headers


def _duration(seconds: float) -> str:
    minutes, rest = divmod(math.ceil(seconds * 1e3) / 1e3, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
