"""Whose request it is: the API key it came with tells tenants apart. Keys themselves go no further."""

from hashlib import blake2b

_DOMAIN = b"tandem.tenant.1"


def tenant_of(key: str | None) -> str:
    """A name for whoever shows this API key; "" without one, where none is asked for."""
    return blake2b(key.encode(), digest_size=16, person=_DOMAIN).hexdigest() if key else ""


def tenant_salt(tenant: str, salt: str) -> str:
    """The cache salt of a tenant's requests that asked for `salt`: no two tenants, and no two salts of one, have the
    same. A tenant's name has a fixed length and no slash.
    """
    return f"{tenant}/{salt}" if tenant or salt else ""
