"""Determines and logs the UCX transport to each peer, and warns if a faster one should be available.

The sender learns the transport after its first pages, from UCX's own tables (`ucx_log.py`). The tables do not name
peers, but say whether they are for this host or for others, so the peer's host decides which table applies.
"""

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from kv_transfer.layout import KVLayout
from kv_transfer.nixl_backend.ucx_log import find_transport
from tandem.protocol.messages import PeerDescription, PeerRef

log = logging.getLogger(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TCP = "tcp"


def host_id() -> str:
    """Return an id of the running host, equal in all of its containers."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


class UcxTransports:
    """The UCX transports that one NIXL transport uses to reach its peers.

    `learn` and `forget` are called on the transport's thread; any thread may read the attributes.
    """

    def __init__(self, backend: str, agent: str, layout: KVLayout, host: str) -> None:
        self._backend = backend
        self._agent = agent
        self._layout = layout
        self._host = host
        self._known: dict[PeerRef, tuple[str, str]] = {}
        self.name = self._backend
        """Back end and UCX transports, e.g. `UCX (cma)`; with the peers if the transports differ."""
        self.kinds = self._backend
        """Back end and UCX transports without peers, e.g. `UCX (cma, tcp)`: one value per combination of transports."""
        self.warnings: tuple[str, ...] = ()
        """Warnings about peers that are reached over a slow UCX transport, with advice."""

    def learn(self, peer: PeerDescription, ucx_log: str, environment: Mapping[str, str] = os.environ) -> None:
        """Determine and log the UCX transport to `peer` after its first pages.

        `ucx_log` is the text of UCX's whole log.
        """
        near = bool(self._host) and peer.host == self._host
        place = near if peer.host else None
        wire = find_transport(ucx_log, self._agent, self._layout.page_bytes, near=place) or ""
        route, on_gpu = f"go to {peer.peer.worker_id}", "VRAM" in (self._layout.memory, peer.memory)
        slow = slow_transport(wire, route, near=near, on_gpu=on_gpu, environment=environment)
        log.info("KV pages %s by %s (%s)", route, self._backend, wire or "UCX does not report the transport")
        if slow:
            log.warning("%s", slow)
        self._known[peer.peer] = (wire, slow)
        self._sum_up()

    def forget(self, peer: PeerRef) -> None:
        """Remove a peer that is gone or was restarted."""
        if self._known.pop(peer, None) is not None:
            self._sum_up()

    def _sum_up(self) -> None:
        transports = sorted((peer.worker_id, wire) for peer, (wire, _) in self._known.items() if wire)
        kinds = sorted({wire for _, wire in transports})
        named = kinds if len(kinds) < 2 else [f"{wire} to {worker_id}" for worker_id, wire in transports]
        self.name = self._naming(named)
        self.kinds = self._naming(kinds)
        self.warnings = tuple(slow for _, slow in self._known.values() if slow)

    def _naming(self, transports: Sequence[str]) -> str:
        return f"{self._backend} ({', '.join(transports)})" if transports else self._backend


def slow_transport(wire: str, route: str, *, near: bool, on_gpu: bool, environment: Mapping[str, str]) -> str:
    """Return a warning if pages go over TCP although a faster transport should exist; "" if there is none.

    Also warns if pages from or to a GPU go over an unknown transport. `route`: the direction of the pages, e.g. `go to
    decode-0`. `near`: both workers are on one host. `on_gpu`: the pages of either worker are in GPU memory.
    """
    if not wire and on_gpu:
        return (
            f"KV pages {route} by a transport that UCX does not name, maybe TCP; unset UCX_LOG_FILE and UCX_LOG_LEVEL"
        )
    if TCP not in wire.split("+") or not (near or on_gpu):
        return ""
    if near and on_gpu:
        why, better = "both workers are on this host and pages on a GPU", "CUDA IPC: both GPUs visible to both workers"
    elif near:
        why, better = "both workers are on this host", "shared memory: one /dev/shm and PID namespace for both workers"
    else:
        why, better = "pages are on a GPU", "RDMA: the network cards' drivers, and nvidia-peermem or DMA-BUF"
    chosen = environment.get("UCX_TLS", "")
    advice = f"UCX_TLS={chosen} asks for it: unset it for {better}" if chosen else f"give it {better}"
    return f"KV pages {route} over TCP though {why}, many times slower than they could: {advice}"
