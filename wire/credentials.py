"""API keys and the cluster's token: what may be one, and how a caller shows it, the same at every door."""

import hmac
from collections.abc import Iterable

from wire.errors import InvalidArgument

_SCHEME = b"bearer "


def check_key(field: str, key: str) -> None:
    """InvalidArgument that names `field` if no client could show `key`: headers carry visible ASCII, no spaces."""
    if not key:
        raise InvalidArgument(field, "is empty, and an empty key would let everybody in; give a key or leave it out")
    if not all("!" <= char <= "~" for char in key):
        raise InvalidArgument(field, "must be ASCII letters, digits and signs without spaces; choose another key")


def reading_keys(metrics_key: str, api_keys: Iterable[str], token: str, *, loopback: bool) -> frozenset[str]:
    """Who may read a process's metrics: bearers of the metrics key and of the cluster's token; nobody is asked for a
    key (none are returned) where there is no metrics key, no API key either, and the door is on `loopback`.

    An API key does not open them: a tenant should not see what others do.
    """
    closed = bool(metrics_key) or any(api_keys) or not loopback
    if not closed:
        return frozenset()
    return frozenset({metrics_key, token} - {""}) or frozenset({""})  # which opens nothing


def shows_key(authorization: bytes | str, keys: Iterable[str]) -> bool:
    """Whether an `authorization` header is "Bearer " and one of `keys`. Nothing, or an empty key, opens no door."""
    header = authorization.encode() if isinstance(authorization, str) else authorization
    if header[: len(_SCHEME)].lower() != _SCHEME:
        return False
    given = header[len(_SCHEME) :]
    # Every key is compared, so that the time taken tells nothing about them.
    matches = [hmac.compare_digest(given, key.encode()) for key in keys]
    return bool(given) and any(matches)
