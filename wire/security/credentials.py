"""API keys and the cluster's token: their syntax, their check, and the secrets derived from the token."""

import functools
import hashlib
import hmac
from collections.abc import Collection, Iterable

from wire.address import is_loopback
from wire.errors import InvalidArgument

_SCHEME = b"bearer "


def check_key(field: str, key: str) -> None:
    """Raise InvalidArgument for `field` unless `key` is visible ASCII without spaces, as headers require."""
    if not key:
        raise InvalidArgument(field, "is empty, and an empty key would let everybody in; give a key or leave it out")
    if not all("!" <= char <= "~" for char in key):
        raise InvalidArgument(field, "must be ASCII letters, digits and signs without spaces; choose another key")


def check_guarded(field: str, host: str, api_keys: Collection[str], *, insecure: bool) -> None:
    """Raise InvalidArgument for `field` if a router on `host` would be open to the network without an API key.

    That is the case if `host` is not loopback, there are no `api_keys`, and `insecure` is not set.
    """
    if not api_keys and not insecure and not is_loopback(host):
        advice = "give --api-key or --api-key-file, or --insecure if that is meant"
        raise InvalidArgument(field, f"{host} lets everyone who reaches it use the cluster without a key; {advice}")


def derived_secret(token: str, purpose: str) -> bytes:
    """Return 64 bytes derived from the cluster's token, different for each `purpose`.

    They reveal the token only to guessing: scrypt makes each guess cost 16 MiB and about 40 ms, which a process pays
    once per token.
    """
    return hmac.digest(_stretched(token), purpose.encode(), "sha512")


def metrics_key_of(token: str) -> str:
    """Return the metrics key for the cluster's components and operators; "" without a token.

    It is sent to every scraped process, and possibly to another process that has its port now. It therefore gives
    access to metrics and traces only, and the token cannot be computed from it.
    """
    return derived_secret(token, "metrics").hex()[:64] if token else ""


def reading_keys(metrics_key: str, api_keys: Iterable[str], token: str, *, loopback: bool) -> frozenset[str]:
    """Return the keys that give access to a process's metrics: the metrics key and the one derived from `token`.

    The set is empty, so that no key is required, if there is neither a metrics key nor an API key and the server
    listens on `loopback`. API keys give no access, because a tenant must not see the load of others.
    """
    closed = bool(metrics_key) or any(api_keys) or not loopback
    if not closed:
        return frozenset()
    return frozenset({metrics_key, metrics_key_of(token)} - {""}) or frozenset({""})  # "" matches no caller


def matching_key(authorizations: Collection[bytes | str], keys: Iterable[str]) -> str | None:
    """Return the one of `keys` in a call's `authorization` header "Bearer KEY", None if there is none.

    The scheme is case-insensitive and followed by one or more spaces. A missing or empty key never matches. Raises
    InvalidArgument for several headers, which two readers of one call could interpret differently.
    """
    if len(authorizations) > 1:
        raise InvalidArgument("authorization", f"is sent {len(authorizations)} times; send one key, once")
    header = next(iter(authorizations), b"")
    if isinstance(header, str):
        header = header.encode()
    if header[: len(_SCHEME)].lower() != _SCHEME:
        return None
    given = header[len(_SCHEME) :].strip(b" ")
    # Every key is compared, so that the duration reveals nothing about them.
    matches = [key for key in keys if hmac.compare_digest(given, key.encode())]
    return matches[0] if given and matches else None


def shows_key(authorization: bytes | str, keys: Iterable[str]) -> bool:
    """Return True if an `authorization` header has one of `keys`."""
    return matching_key((authorization,), keys) is not None


@functools.cache
def _stretched(token: str) -> bytes:
    return hashlib.scrypt(token.encode(), salt=b"tandem cluster token, version 1", n=1 << 14, r=8, p=1)
