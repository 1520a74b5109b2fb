"""Computes digests of full KV pages; a digest identifies the tokens of a page and all tokens before them.

Keys and values of a token depend on every token before it, so a page can be reused only after the same prefix. The
chain of digests begins with the salt of a tenant: pages under different salts have different digests, so that latencies
reveal nothing about the prompts of others. Routers and workers compute the same digests.

The hash is BLAKE2b with 128 bits: tokens are chosen by clients, so it must be collision-resistant.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

DIGEST_BYTES = 16
_DOMAIN = b"tandem.kv.page.1"


def root_digest(salt: str) -> bytes:
    """Return the digest with which the chain of a `salt` begins; it differs from the digests of all pages."""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=_DOMAIN).digest()


def page_digests(token_ids: Sequence[int], page_tokens: int, parent: bytes) -> list[bytes]:
    """Return one digest for each full page of `token_ids`.

    The tokens follow the page with the digest `parent`, or begin a prompt if `parent` is a `root_digest`. Each digest
    is the hash of the parent's digest and the page's token ids as little-endian unsigned 32-bit integers.
    """
    full = len(token_ids) // page_tokens
    data = memoryview(np.asarray(token_ids[: full * page_tokens], dtype="<u4").tobytes())
    size = 4 * page_tokens
    digests = []
    for first in range(0, len(data), size):
        state = blake2b(parent, digest_size=DIGEST_BYTES)
        state.update(data[first : first + size])
        parent = state.digest()
        digests.append(parent)
    return digests
