"""Whose request it is: the API key it came with tells tenants apart. Keys themselves go no further."""

from collections.abc import Iterable
from hashlib import blake2b

_DOMAIN = b"tandem.tenant.1"
_SCHEME_LENGTH = len("bearer ")


def tenant_of(authorization: bytes | str, keys: Iterable[str]) -> str:
    """A name for the bearer of the key in an `authorization` header that a door has let in; "" if no keys are used."""
    if not tuple(keys):
        return ""
    header = authorization.encode() if isinstance(authorization, str) else authorization
    return blake2b(header[_SCHEME_LENGTH:], digest_size=16, person=_DOMAIN).hexdigest()


def tenant_salt(tenant: str, salt: str) -> str:
    """The cache salt of a tenant's requests that asked for `salt`: no two tenants, and no two salts of one, have the
    same. A tenant's name has a fixed length and no slash.
    """
    return f"{tenant}/{salt}" if tenant or salt else ""
