"""Syntax and checks of API keys and of the cluster's token, and secrets that are derived from the token."""

import functools
import hashlib
import hmac
from collections.abc import Callable, Iterable

from tandem.net.address import is_loopback
from tandem.protocol.errors import InvalidArgument

_SCHEME = b"bearer "


def check_guarded(field: str, host: str, *, guarded: bool, insecure: bool) -> None:
    """Raise InvalidArgument for `field` if a router on `host` would be open to the network without an API key.

    `guarded` is True if the router requires API keys. They are not required on a loopback host, nor with `insecure`.
    """
    if not guarded and not insecure and not is_loopback(host):
        advice = "give --api-key or --api-key-file, or --insecure if that is meant"
        raise InvalidArgument(field, f"{host} lets everyone who reaches it use the cluster without a key; {advice}")


def derived_secret(token: str, purpose: str) -> bytes:
    """Return a secret of 64 bytes derived from the cluster's token, different for each `purpose`.

    The token can be found from the secret only by trying tokens, and scrypt makes each try cost 16 MiB and about 40 ms.
    A process runs scrypt once per token.
    """
    return hmac.digest(_stretched(token), purpose.encode(), "sha512")


def metrics_key_of(token: str) -> str:
    """Return the metrics key of the cluster, derived from its token; "" without a token.

    The key is sent to the port of every process to be scraped, where a foreign process may listen by now. It therefore
    gives access to metrics and traces only, and the token cannot be computed from it.
    """
    return derived_secret(token, "metrics").hex()[:64] if token else ""


def reading_keys(metrics_key: str, token: str, *, guarded: bool, loopback: bool) -> frozenset[str]:
    """Return the keys that give access to a process's metrics: `metrics_key` and the one derived from `token`.

    No key is required, and the set is empty, if there is no metrics key, no API keys guard the router (`guarded` is
    False), and the server listens on `loopback`. If a key is required but none exists, the set has only "", which no
    call presents. Tenants' keys give no access, because a tenant must not see the load of others.
    """
    closed = bool(metrics_key) or guarded or not loopback
    if not closed:
        return frozenset()
    return frozenset({metrics_key, metrics_key_of(token)} - {""}) or frozenset({""})  # "" matches no caller


def presented_key(headers: Iterable[tuple[str | bytes, str | bytes]]) -> bytes | None:
    """Return the key that a call presents in its headers or metadata; None if it presents none.

    Header names are in lower case. The scheme `Bearer` is case-insensitive and followed by one or more spaces. Raises
    InvalidArgument if several headers have a key, because two readers of the call could then use different keys.
    """
    presented = [(_bytes(name), _bytes(value)) for name, value in headers if _bytes(name) in _KEY_HEADERS]
    if len(presented) > 1:
        raise InvalidArgument(presented[0][0].decode(), f"is sent {len(presented)} times; send one key, once")
    return _KEY_HEADERS[presented[0][0]](presented[0][1]) if presented else None


def shows_key(headers: Iterable[tuple[str | bytes, str | bytes]], keys: Iterable[str]) -> bool:
    """Return True if a call presents one of `keys` in its headers. Raises InvalidArgument if it presents several."""
    presented = presented_key(headers) or b""
    # Every key is compared, so that the duration reveals nothing about the keys.
    matches = [hmac.compare_digest(presented, key.encode()) for key in keys]
    return bool(presented) and any(matches)


def _bearer(value: bytes) -> bytes | None:
    if value[: len(_SCHEME)].lower() != _SCHEME:
        return None
    return value[len(_SCHEME) :].strip(b" ") or None


_KEY_HEADERS: dict[bytes, Callable[[bytes], bytes | None]] = {b"authorization": _bearer}
"""The headers that may have a key, each with the function that extracts the key from the value."""


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


@functools.cache
def _stretched(token: str) -> bytes:
    return hashlib.scrypt(token.encode(), salt=b"tandem cluster token, version 1", n=1 << 14, r=8, p=1)
