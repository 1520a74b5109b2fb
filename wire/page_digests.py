"""Names for full KV pages: a page's digest stands for its tokens and for all tokens before them.

Keys and values of a token depend on every token before it, so a page may be read again only behind the same prefix.
The chain begins with the salt of a tenant: under another salt no page has the same name, so nobody can tell from
how fast an answer comes what others have asked. Routers and workers name pages alike.

BLAKE2b with 128 bits: tokens are chosen by clients, so the hash must be one for which nobody can find two inputs.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

DIGEST_BYTES = 16
_DOMAIN = b"tandem.kv.page.1"


def root_digest(salt: str) -> bytes:
    """Where the chain of one tenant begins; no page has this name."""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=_DOMAIN).digest()


def page_digests(token_ids: Sequence[int], page_tokens: int, parent: bytes) -> list[bytes]:
    """One digest for each full page of `token_ids`, which follow the page `parent` or begin at a `root_digest`.

    Of the parent's digest and the page's ids as little-endian unsigned 32-bit integers.
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
