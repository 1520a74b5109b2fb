"""API keys and the cluster's token: what may be one, how a caller shows it, and which secrets come from the token."""

import functools
import hashlib
import hmac
from collections.abc import Collection, Iterable

from wire.address import is_loopback
from wire.errors import InvalidArgument

_SCHEME = b"bearer "


def check_key(field: str, key: str) -> None:
    """InvalidArgument that names `field` if no client could show `key`: headers carry visible ASCII, no spaces."""
    if not key:
        raise InvalidArgument(field, "is empty, and an empty key would let everybody in; give a key or leave it out")
    if not all("!" <= char <= "~" for char in key):
        raise InvalidArgument(field, "must be ASCII letters, digits and signs without spaces; choose another key")


def check_guarded(field: str, host: str, api_keys: Collection[str], *, insecure: bool) -> None:
    """InvalidArgument that names `field` if strangers could use a router that listens on `host`: it is not loopback, no
    API key is asked for, and nobody said by `insecure` that this is meant.
    """
    if not api_keys and not insecure and not is_loopback(host):
        advice = "give --api-key or --api-key-file, or --insecure if that is meant"
        raise InvalidArgument(field, f"{host} lets everyone who reaches it use the cluster without a key; {advice}")


def derived_secret(token: str, purpose: str) -> bytes:
    """64 bytes that everybody who knows the cluster's token can compute, different for each `purpose`.

    They tell nothing of the token to who sees them, except that guesses can be tried: scrypt makes each one cost 16 MiB
    and about 40 ms, which a process pays once a token.
    """
    return hmac.digest(_stretched(token), purpose.encode(), "sha512")


def metrics_key_of(token: str) -> str:
    """The key that opens metrics and traces to the cluster's own parts and operators; "" without a token.

    It is sent to every process that is scraped, and to whoever was given such a process's port since: it opens nothing
    but those pages, and the token cannot be computed from it.
    """
    return derived_secret(token, "metrics").hex()[:64] if token else ""


def reading_keys(metrics_key: str, api_keys: Iterable[str], token: str, *, loopback: bool) -> frozenset[str]:
    """Who may read a process's metrics: bearers of the metrics key and of the one that comes from the cluster's token;
    nobody is asked for a key (none are returned) where there is no metrics key, no API key either, and the server
    listens on `loopback`.

    An API key does not open them: a tenant should not see what others do.
    """
    closed = bool(metrics_key) or any(api_keys) or not loopback
    if not closed:
        return frozenset()
    return frozenset({metrics_key, metrics_key_of(token)} - {""}) or frozenset({""})  # which opens nothing


def matching_key(authorizations: Collection[bytes | str], keys: Iterable[str]) -> str | None:
    """The one of `keys` that a call's `authorization` headers show as "Bearer KEY" (the scheme in any case, one space
    or more); None if they show none of them. Nothing, or an empty key, opens no listener. InvalidArgument if there are
    several headers: two readers of one call could each believe another.
    """
    if len(authorizations) > 1:
        raise InvalidArgument("authorization", f"is sent {len(authorizations)} times; send one key, once")
    header = next(iter(authorizations), b"")
    if isinstance(header, str):
        header = header.encode()
    if header[: len(_SCHEME)].lower() != _SCHEME:
        return None
    given = header[len(_SCHEME) :].strip(b" ")
    # Every key is compared, so that the time taken tells nothing about them.
    matches = [key for key in keys if hmac.compare_digest(given, key.encode())]
    return matches[0] if given and matches else None


def shows_key(authorization: bytes | str, keys: Iterable[str]) -> bool:
    """Whether one `authorization` header shows one of `keys`."""
    return matching_key((authorization,), keys) is not None


@functools.cache
def _stretched(token: str) -> bytes:
    return hashlib.scrypt(token.encode(), salt=b"tandem cluster token, version 1", n=1 << 14, r=8, p=1)
