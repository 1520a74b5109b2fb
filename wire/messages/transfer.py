"""What two workers tell each other about KV pages: where they lie, what was written, what it should hold."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wire.messages.leases import Lease
from wire.messages.references import PeerRef


@dataclass(frozen=True, slots=True)
class PeerDescription:
    """How to reach a worker's KV memory: back-end metadata, base address (bytes), page size (bytes) and count.

    `host` names the running host, `process` the owner's process to those who can see it; empty = unknown.
    At `probe_address` there is a page of registered host memory that means nothing and may be read; 0 = none.
    """

    peer: PeerRef
    agent_metadata: bytes
    base_address: int
    page_bytes: int
    pages: int
    device_id: int
    memory: str
    host: str = ""
    process: str = ""
    probe_address: int = 0


@dataclass(frozen=True, slots=True)
class Handshake:
    """One side's introduction; version and hash are compared before the rest is looked at."""

    protocol_version: int
    compatibility_hash: str
    compatibility_facts: tuple[tuple[str, str], ...]
    description: PeerDescription


@dataclass(frozen=True, slots=True)
class PageChecksum:
    """What the prompt's page number `page` held when it was written; `value` is below 2^64."""

    page: int
    value: int


@dataclass(frozen=True, slots=True)
class TransferNotice:
    """Goes with the last write: what arrived, stamped, and how to go on (the token that was drawn, next random draw).

    The first `skipped` of the `pages` were not sent; what they hold is the receiver's own to know.

    `token_hash` is of all tokens that were prefilled, the prompt and the `answered` tokens behind it; `first_token_id`
    is the answer's token number `answered`, the first of this attempt.
    """

    lease: Lease
    prefill: PeerRef
    token_hash: bytes
    pages: int
    first_token_id: int
    next_draw: int
    checksums: tuple[PageChecksum, ...] = ()
    skipped: int = 0


def hash_token_ids(token_ids: Sequence[int]) -> bytes:
    """SHA-256 over token ids as little-endian unsigned 32-bit integers; 32 bytes."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<u4").tobytes()).digest()
