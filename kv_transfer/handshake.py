"""The handshake of two workers before any transfer: both must have the same protocol, model and page layout.

The compatibility hash covers facts: (name, value) pairs of text that must be equal on both sides. The caller passes the
engine's facts (model revision, dtype, quantization of the KV, …); the layout's facts are added here. The pool's kind of
memory (host or device) and its number of pages are not among the facts, because they may differ.
"""

import hashlib
from collections.abc import Iterable

from kv_transfer.layout import KVLayout
from tandem.protocol.errors import FailedPrecondition
from tandem.protocol.kv_pages import window_name
from tandem.protocol.messages import Handshake, PeerDescription

PROTOCOL_VERSION = 12
"""The protocol version, incremented whenever messages or bytes between two workers change their meaning."""

Facts = tuple[tuple[str, str], ...]


def layout_facts(layout: KVLayout) -> Facts:
    """Return the facts that must be equal in two pools so that a page of one fits into the other."""
    return (
        ("layout", "pages, kv_heads, layers, parts, page_tokens, head_dim"),
        ("kv_dtype", layout.dtype),
        ("item_bytes", str(layout.item_bytes)),
        ("scale_bytes", str(layout.scale_bytes)),
        ("kv_groups", str(len(layout.windows))),
        ("windows", ", ".join(map(window_name, layout.windows))),
        ("other_groups", "; ".join(layout.other_groups) or "none"),
        ("layers", str(layout.layers)),
        ("parts", str(len(layout.dims))),
        ("kv_heads", str(layout.kv_heads)),
        ("head_dim", " and ".join(map(str, dict.fromkeys(layout.dims)))),
        ("page_tokens", str(layout.page_tokens)),
    )


def compatibility_hash(facts: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 of the facts in hex, independent of their order.

    The lengths of the texts are hashed too, so that different facts never give the same input.
    """
    digest = hashlib.sha256()
    for text in (part for fact in sorted(facts) for part in fact):
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def make_handshake(description: PeerDescription, engine_facts: Facts, layout: KVLayout) -> Handshake:
    """Return this worker's handshake. Raises ValueError if a fact is named twice."""
    facts = tuple(sorted((*engine_facts, *layout_facts(layout))))
    names = [name for name, _ in facts]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"facts named twice: {', '.join(twice)}")
    return Handshake(PROTOCOL_VERSION, compatibility_hash(facts), facts, description)


def check_compatible(local: Handshake, remote: Handshake) -> None:
    """Raise FailedPrecondition unless the two handshakes are compatible.

    The error names every fact that differs, with both values. The version is compared first, then the hash; nothing
    else of `remote` is read before both are equal.
    """
    if local.protocol_version != remote.protocol_version:
        raise FailedPrecondition(
            f"transfer protocol: {local.description.peer.worker_id} speaks version {local.protocol_version},"
            f" the other side {remote.protocol_version}; run the same release of Tandem on both"
        )
    if local.compatibility_hash != remote.compatibility_hash:
        raise FailedPrecondition(_refusal(local, remote))


def _refusal(local: Handshake, remote: Handshake) -> str:
    local_facts, remote_facts = dict(local.compatibility_facts), dict(remote.compatibility_facts)
    differing = [
        f"{name} is {local_facts.get(name, 'absent')} on {local.description.peer.worker_id}"
        f" but {remote_facts.get(name, 'absent')} on {remote.description.peer.worker_id}"
        for name in sorted(local_facts.keys() | remote_facts.keys())
        if local_facts.get(name) != remote_facts.get(name)
    ]
    if not differing:
        return "compatibility hashes differ though the facts read the same; run the same release of Tandem on both"
    return f"KV pages do not fit: {'; '.join(differing)}; start both workers with the same model and KV settings"
