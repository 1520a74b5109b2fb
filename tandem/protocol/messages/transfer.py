"""Messages between two workers about KV transfers: memory descriptions, handshakes and notices."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.protocol.messages.leases import Lease
from tandem.protocol.messages.references import PeerRef


@dataclass(frozen=True, slots=True)
class PeerDescription:
    """The description of a worker's KV memory: back-end metadata, base address, page size in bytes and page count.

    `host` identifies the running host, `process` the worker's process in its PID namespace; empty = unknown.
    `probe_address` is a page of registered host memory without content that peers may read; 0 = none.
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
    """One side of the transfer handshake; version and hash are compared before the rest is read."""

    protocol_version: int
    compatibility_hash: str
    compatibility_facts: tuple[tuple[str, str], ...]
    description: PeerDescription


@dataclass(frozen=True, slots=True)
class PageChecksum:
    """The checksum of one prompt page when it was written; `value` is below 2^64, `page` its entry (`KvPages`)."""

    page: int
    value: int


@dataclass(frozen=True, slots=True)
class TransferNotice:
    """The notice that completes a KV transfer, with the state to continue: the sampled token and the next random draw.

    It is sent with the last write. The first `skipped` of the `pages` pages were not sent, because the receiver has
    them in its prefix cache. `token_hash` covers all prefilled tokens: the prompt and the `prior_output_tokens` answer
    tokens after it. `first_token_id` is the answer's token number `prior_output_tokens`, the first one of this attempt.
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
    """Return SHA-256 over token ids as little-endian unsigned 32-bit integers, 32 bytes."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<u4").tobytes()).digest()
