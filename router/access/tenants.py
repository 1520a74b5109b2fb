"""Tenants, identified by a hash of the API key or of its name; the keys themselves are not passed on."""

from hashlib import blake2b

from tandem.net.security.api_keys import digest_of

_DOMAIN = b"tandem.tenant.2"
_NAME_DOMAIN = b"tandem.named.1"


def tenant_of(key: str | None) -> str:
    """Return the tenant's id for an API key without a name; "" if there is no key."""
    return tenant_of_digest(digest_of(key)) if key else ""


def tenant_of_digest(digest: bytes) -> str:
    """Return the same for the SHA-256 of the key."""
    return blake2b(digest, digest_size=16, person=_DOMAIN).hexdigest()


def tenant_named(name: str) -> str:
    """Return the tenant's id for all API keys of this name, never that of a key without a name."""
    return blake2b(name.encode(), digest_size=16, person=_NAME_DOMAIN).hexdigest()


def tenant_salt(tenant: str, salt: str, adapter: str = "") -> str:
    """Return the cache salt for a tenant's requests with `salt` and an adapter's hash, unique for each such triple.

    A tenant's id has a fixed length, neither slash nor colon, and so has the hash: the concatenation is unambiguous.
    """
    own = f"{tenant}/{salt}" if tenant or salt else ""
    return f"adapter:{adapter}/{own}" if adapter else own
