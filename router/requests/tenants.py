"""Tenants, identified by a hash of the API key; the keys themselves are not passed on."""

from hashlib import blake2b

_DOMAIN = b"tandem.tenant.1"


def tenant_of(key: str | None) -> str:
    """Return the tenant name for an API key; "" if there is no key."""
    return blake2b(key.encode(), digest_size=16, person=_DOMAIN).hexdigest() if key else ""


def tenant_salt(tenant: str, salt: str, adapter: str = "") -> str:
    """Return the cache salt for a tenant's requests with `salt` and an adapter's hash, unique for each such triple.

    A tenant's name has a fixed length, neither slash nor colon, and so has the hash: the concatenation is unambiguous.
    """
    own = f"{tenant}/{salt}" if tenant or salt else ""
    return f"adapter:{adapter}/{own}" if adapter else own
