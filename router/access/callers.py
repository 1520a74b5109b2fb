"""The callers of one router: the API key of a call, the tenant that owns the key, and the calls that it allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router.access.quota import Quota
from router.access.tenants import tenant_named, tenant_of_digest
from tandem.net.security.api_keys import ApiKey, ApiKeys, KeyRole, KeySource, check_role, no_valid_key
from tandem.protocol.errors import RateLimited, TandemError

Headers = Iterable[tuple[str | bytes, str | bytes]]

_NAME_DIGITS = 12
"""Number of digits of the tenant's id that the audit log shows for a key without a name."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant that makes a call, and its quota."""

    tenant: str = ""
    """The tenant's id, a hash; "" if no key is required."""
    name: str = ""
    """The tenant's readable name for the audit log; never the key."""
    quota: Quota | None = None


ANYONE = Caller()
"""The caller of calls that need no key, and of calls whose key has not been checked yet."""


class Callers:
    """Checks the API keys of calls, and keeps the quotas of all tenants of this router.

    The router's server owns it; all calls are on the event loop.
    """

    def __init__(
        self,
        source: KeySource,
        refused: Callable[[str, TandemError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """For each request over its tenant's quota, `refused` is called with "" as SLO class and with the error.

        Raises InvalidArgument if a key file cannot be used.
        """
        self._refused = refused
        self._keys = ApiKeys(source, clock)
        self.check = self._keys.check
        """The key check: raises Unauthenticated for a call that needs a key and has no valid key."""
        self._metrics_closed = bool(source.readers)
        self._clock = clock
        self._known: dict[ApiKey, Caller] = {}
        self._quotas: dict[tuple[str, int, int], Quota] = {}

    def tenant(self, headers: Headers) -> Caller:
        """Check the key of a request for an answer, and return the caller.

        Raises Unauthenticated without a valid key, and PermissionDenied if the key's role is not allowed.
        """
        return self._caller(headers, KeyRole.TENANT, KeyRole.OPERATOR)

    def any_role(self, headers: Headers) -> Caller:
        """Check the key of a call that every valid key may make, and return the caller."""
        return self._caller(headers, *KeyRole)

    def reader(self, headers: Headers, *, metrics: bool = False) -> Caller:
        """Check the key of a call that reads the router's state, or its metrics if `metrics`; return the caller.

        Metrics need a key if a metrics key is configured, even if API keys are not required.
        """
        closed, kind = (self._metrics_closed, "metrics key") if metrics else (self._keys.required, "API key")
        return self._caller(headers, KeyRole.OPERATOR, KeyRole.READER, closed=closed, kind=kind)

    def operator(self, headers: Headers) -> Caller:
        """Check the key of a call that changes the cluster, and return the caller; only an operator's key is valid."""
        return self._caller(headers, KeyRole.OPERATOR)

    def admit(self, caller: Caller) -> None:
        """Charge one request to the caller's quota. Raises RateLimited if the quota is used up."""
        if caller.quota is None:
            return
        try:
            caller.quota.admit()
        except RateLimited as error:
            self._refused("", error)
            raise

    def _caller(self, headers: Headers, *roles: KeyRole, closed: bool | None = None, kind: str = "API key") -> Caller:
        key = self._keys.find(headers)
        if not (self._keys.required if closed is None else closed):
            return ANYONE
        if key is None:
            raise no_valid_key(kind)
        check_role(key, *roles)
        if key not in self._known:
            self._known[key] = self._new(key)
        return self._known[key]

    def _new(self, key: ApiKey) -> Caller:
        tenant = tenant_named(key.name) if key.name else tenant_of_digest(key.digest)
        limits = key.requests_per_minute, key.tokens_per_minute
        quota = None
        if any(limits):
            quota = self._quotas.setdefault((tenant, *limits), Quota(*limits, self._clock))
        return Caller(tenant, key.name or f"key-{tenant[:_NAME_DIGITS]}", quota)
