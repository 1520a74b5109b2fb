"""Tenant ids: the hash of an API key, or of its name if it has one, so that keys are not passed on."""

from hashlib import blake2b

from tandem.net.security.api_keys import digest_of

_DOMAIN = b"tandem.tenant.2"
_NAME_DOMAIN = b"tandem.named.1"


def tenant_of(key: str | None) -> str:
    """Return the tenant's id for an API key without a name; "" if there is no key."""
    return tenant_of_digest(digest_of(key)) if key else ""


def tenant_of_digest(digest: bytes) -> str:
    """Return the tenant's id for an API key without a name, given the key's SHA-256 digest."""
    return blake2b(digest, digest_size=16, person=_DOMAIN).hexdigest()


def tenant_named(name: str) -> str:
    """Return the id of the tenant that owns all API keys with this name; it differs from the ids of unnamed keys."""
    return blake2b(name.encode(), digest_size=16, person=_NAME_DOMAIN).hexdigest()


def tenant_salt(tenant: str, salt: str, adapter: str = "") -> str:
    """Return the prefix cache salt for a tenant's requests, from the client's `salt` and an adapter's hash.

    It is unique for each combination of the three: tenant ids and hashes have a fixed length and contain neither slash
    nor colon, so the concatenation is unambiguous.
    """
    own = f"{tenant}/{salt}" if tenant or salt else ""
    return f"adapter:{adapter}/{own}" if adapter else own


def split_salt(salt: str) -> tuple[str, str]:
    """Return the adapter's hash ("" = the base model) and the rest of a salt that `tenant_salt` has made.

    The rest is the client's salt, preceded by the tenant and a slash if there is a tenant.
    """
    adapter = ""
    if salt.startswith("adapter:"):
        adapter, _, salt = salt.removeprefix("adapter:").partition("/")
    return adapter, salt.removeprefix("/")
