"""Messages between workers about KV transfers: descriptions of memory, handshakes and notices."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.protocol.messages.leases import Lease
from tandem.protocol.messages.references import PeerRef


@dataclass(frozen=True, slots=True)
class PeerDescription:
    """The memory of a worker's KV cache: back-end metadata, base address, page size in bytes, number of pages.

    `host` identifies the running host, `process` the worker's process in its PID namespace; empty = unknown.
    `probe_address` is the address of a page of registered host memory without content, which peers may read to find out
    whether the process is alive; 0 = none.
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
    other_ranks: "tuple[PeerDescription, ...]" = ()
    """The memory of the worker's other ranks, in order; empty unless a group of ranks divides the model."""
    stage: int = 0
    """The pipeline stage whose layers the memory has; stage 0 has the last layers, because its first rank samples."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """The message of either side in the transfer handshake.

    Version and compatibility hash are compared before the description is decoded.
    """

    protocol_version: int
    compatibility_hash: str
    compatibility_facts: tuple[tuple[str, str], ...]
    description: PeerDescription


@dataclass(frozen=True, slots=True)
class PageChecksum:
    """The checksum of a page of a prompt's KV, computed before the transfer; `value` is below 2^64.

    `page` is the index of the page in the request's page list (`tandem/protocol/kv_pages.py`).
    """

    page: int
    value: int


@dataclass(frozen=True, slots=True)
class TransferNotice:
    """The notice that completes a KV transfer; it is sent with the last write.

    The first `skipped` of the `pages` pages were not sent, because the receiver has them in its prefix cache.
    `token_hash` covers all prefilled tokens: the prompt and the `prior_output_tokens` answer tokens after it.
    `first_token_id` is the token that the prefill worker sampled, at position `prior_output_tokens` of the answer, from
    0. `next_draw` is the index of the next random number in the request's seeded sequence.

    This is notice `part` of the `parts` notices of a transfer: with groups of ranks, each pair of a sending and a
    receiving rank has a notice, and the KV is complete with the last of them.
    """

    lease: Lease
    prefill: PeerRef
    token_hash: bytes
    pages: int
    first_token_id: int
    next_draw: int
    checksums: tuple[PageChecksum, ...] = ()
    skipped: int = 0
    part: int = 0
    parts: int = 1


def hash_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return the SHA-256 (32 bytes) of the token ids as little-endian unsigned 32-bit integers."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<u4").tobytes()).digest()
