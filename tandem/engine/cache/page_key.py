"""The name of a page in a tier."""

from typing import NamedTuple


class PageKey(NamedTuple):
    """The name of a stored page, which depends on all that its contents depend on."""

    digest: bytes
    """The digest of the page's tokens and of all tokens before them, which includes the tenant's salt."""
    group: int
    """The group of layers whose KV or states the page has."""
