"""Tenants, identified by a hash of the API key; the keys themselves are not passed on."""

from hashlib import blake2b

_DOMAIN = b"tandem.tenant.1"


def tenant_of(key: str | None) -> str:
    """Return the tenant name for an API key; "" if there is no key."""
    return blake2b(key.encode(), digest_size=16, person=_DOMAIN).hexdigest() if key else ""


def tenant_salt(tenant: str, salt: str) -> str:
    """Return the cache salt for a tenant's requests with `salt`, unique for each pair of tenant and salt.

    A tenant's name has a fixed length and no slash, so the concatenation is unambiguous.
    """
    return f"{tenant}/{salt}" if tenant or salt else ""
