"""One NIXL agent over one page pool, used by one thread; the only file that calls NIXL.

The agent has no progress thread: NIXL's progress thread polls without a timeout and costs a whole core when idle
(measured: 1.0 CPU seconds per second; 0.0001 without the thread). UCX makes progress when the transport's thread asks
this agent for states or notices. As no other thread uses the agent, it needs no lock.
"""

import ctypes
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from kv_transfer.base import PageRanges, PageWrite
from kv_transfer.layout import KVLayout
from kv_transfer.nixl_backend.processes import process_alive, this_process
from kv_transfer.nixl_backend.ucx_log import UCX_LOG
from kv_transfer.nixl_backend.ucx_shared_memory import check_transports, listening, ucx_settings
from kv_transfer.nixl_backend.ucx_transports import host_id
from tandem.protocol.errors import FailedPrecondition
from tandem.protocol.messages import PeerDescription, PeerRef

log = logging.getLogger(__name__)

UCX = "UCX"
PROBE_BYTES = 4096
"""The size in bytes of a probe, large enough that UCX has the kernel copy the probe from process to process."""


class TransferState(Enum):
    """The state of a posted transfer."""

    IN_PROGRESS = "moving"
    DONE = "done"
    """Every byte is in place (NIXL flushes the endpoint after puts), and the notice, if any, was sent after them."""
    FAILED = "failed"
    """The endpoint has failed: UCX has completed all its operations with an error and posts no further ones."""


@dataclass(slots=True, eq=False)
class Connection:
    """A connection to a peer: NIXL's name of its agent, and prepared lists of the ranges that writes copy.

    Range r of page n has the index n · R + r in both lists, if there are R ranges per page over all orders.
    `PoolAgent.disconnect` ends the connection.
    """

    agent: str
    local_ranges: Any
    remote_ranges: Any
    ranges_per_order: tuple[int, ...] = (1,)
    """The number of ranges of a page of each order (`RankTransport.add_peer`)."""


def load_nixl() -> Any:
    """Return NIXL's Python module. Raises FailedPrecondition if no build of it can be imported.

    The wheels differ in the CUDA runtime for which they were built; the wheel that matches a loaded torch is preferred.
    The metapackage `nixl` is not used: it requires both wheels, and refuses the installed one if torch was built for
    the other CUDA runtime.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or ""
    names = ["nixl_cu12", "nixl_cu13"] if cuda.startswith("12") else ["nixl_cu13", "nixl_cu12"]
    reasons = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
    raise FailedPrecondition(
        f"NIXL cannot be imported ({'; '.join(reasons)}); on Linux install nixl-cu13, or nixl-cu12 for CUDA 12"
    )


def agent_name(peer: PeerRef) -> str:
    """Return the NIXL agent name of one incarnation of a worker. Names are never reused."""
    return f"{peer.worker_id}/{peer.incarnation}"


class PoolAgent:
    """The NIXL agent of worker `me`.

    The pool's memory belongs to the engine; it is registered once, when the agent is created, and `close` deregisters
    it. NIXL's own errors pass through these methods unchanged; the caller converts them to typed ones. Owned by the
    transport and used on its thread only.
    """

    def __init__(self, layout: KVLayout, me: PeerRef, *, trusted_network: bool = False) -> None:
        check_transports(os.environ, trusted_network=trusted_network)
        nixl = load_nixl()
        self.name, self.me = agent_name(me), me
        self._layout, self._trusted_network = layout, trusted_network
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[UCX])
        before = listening()
        with UCX_LOG.captured(ucx_settings(trusted_network=trusted_network)):
            self._agent: Any = nixl.nixl_agent(self.name, config)
        self.open_ports = tuple(sorted(listening() - before))
        """host:port of each TCP socket that UCX has opened."""
        if UCX not in self._agent.backends:
            raise FailedPrecondition("NIXL has no UCX plug-in here; `tandem doctor` lists what it has")
        pool = [(layout.base_address, layout.total_bytes, layout.device_id, "")]
        self._registration = self._agent.register_memory(pool, layout.memory)
        self._pages = _page_list(layout.base_address, layout.page_bytes, layout.pages, layout.device_id)
        self._local_pages = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._pages, layout.memory)
        self._probe = np.zeros(PROBE_BYTES, dtype=np.uint8)
        probe = (self._probe.ctypes.data, PROBE_BYTES, 0)
        self._probe_registration = self._agent.register_memory([(*probe, "")], "DRAM")
        self._local_probe = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", [probe], "DRAM")

    def describe(self) -> PeerDescription:
        """Return the description with which peers can write to the pool."""
        layout = self._layout
        metadata = bytes(self._agent.get_agent_metadata())
        return PeerDescription(
            self.me,
            metadata,
            layout.base_address,
            layout.page_bytes,
            layout.pages,
            layout.device_id,
            layout.memory,
            host_id(),
            this_process(),
            self._probe.ctypes.data,
        )

    def connect(self, peer: PeerDescription, ranges: PageRanges = ()) -> Connection:
        """Load a peer's metadata, and prepare the lists of whole pages or, with `ranges`, of these parts of pages."""
        name = self._agent.add_remote_agent(peer.agent_metadata).decode()
        if name != agent_name(peer.peer):
            raise FailedPrecondition(f"metadata of {agent_name(peer.peer)} is {name}'s; introduce the peer again")
        try:
            theirs = _page_list(peer.base_address, peer.page_bytes, peer.pages, peer.device_id)
            if not ranges:
                return Connection(name, self._local_pages, self._agent.prep_xfer_dlist(name, theirs, peer.memory))
            parts = [part for order in ranges for part in order]
            local = _parts(self._pages, [(part.source_start, part.bytes) for part in parts])
            remote = _parts(theirs, [(part.target_start, part.bytes) for part in parts])
            return Connection(
                name,
                self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, self._layout.memory),
                self._agent.prep_xfer_dlist(name, remote, peer.memory),
                tuple(map(len, ranges)),
            )
        except Exception:
            self._agent.remove_remote_agent(name)
            raise

    def disconnect(self, connection: Connection) -> None:
        """Release the page lists, the metadata and the endpoint of a peer.

        No transfer of this agent with the peer may be in flight, because UCX would follow freed pointers.
        """
        connection.remote_ranges.release()
        if connection.local_ranges is not self._local_pages:
            connection.local_ranges.release()
        self._agent.remove_remote_agent(connection.agent)

    def fail_if_dead(self, peer: PeerDescription, connection: Connection) -> bool:
        """Return True if the peer's process has ended, and let UCX fail every operation that waits for it.

        UCX detects the end by itself only when it copies pages, not while notices wait in a shared-memory segment that
        nothing reads. This call makes UCX copy from the process: the kernel refuses, and the endpoint fails. On a
        trusted network this call does nothing, because UCX's keepalive detects the end.
        """
        if self._trusted_network or not peer.probe_address or process_alive(peer.process) is not False:
            return False
        try:
            there = self._agent.prep_xfer_dlist(connection.agent, [(peer.probe_address, PROBE_BYTES, 0)], "DRAM")
            handle = self._agent.make_prepped_xfer("READ", self._local_probe, [0], there, [0], b"", [UCX])
            state = self._agent.transfer(handle)
        except Exception as error:
            log.info("the process of %s has ended: %r", connection.agent, error)
            return True
        log.warning("the process of %s has ended, but its memory could be read: %s", connection.agent, state)
        return False

    def prepare(self, connection: Connection, write: PageWrite, notice: bytes) -> Any:
        """Prepare the write of a write's pages and return its handle, for `start`, `state` and `release`.

        The notice is sent to the peer once all bytes are in place; it may be empty. There must be at least one page,
        and all pages must be in range.
        """
        per_order, orders = connection.ranges_per_order, write.groups
        return self._agent.make_prepped_xfer(
            "WRITE",
            connection.local_ranges,
            range_indices(write.local_pages, orders, per_order),
            connection.remote_ranges,
            range_indices(write.remote_pages, orders, per_order),
            notice,
            [UCX],
        )

    def start(self, handle: Any) -> TransferState:
        """Post a prepared transfer. Over cma and cuda_ipc the copy may be complete when this returns."""
        return self._seen(lambda: self._agent.transfer(handle))

    def state(self, handle: Any) -> TransferState:
        """Let UCX make progress, and return the transfer's state."""
        return self._seen(lambda: self._agent.check_xfer_state(handle))

    def release(self, handle: Any) -> None:
        """Free a handle. A put in flight continues unobserved, because UCX cannot cancel it."""
        try:
            handle.release()
        except Exception as error:
            log.warning("NIXL did not release a transfer handle: %r", error)

    def notify(self, connection: Connection, notice: bytes) -> None:
        """Send a notice on its own, without a page write."""
        self._agent.send_notif(connection.agent, notice)

    def notices(self) -> list[tuple[str, bytes]]:
        """Let UCX make progress, and return new notices as (agent name, bytes)."""
        return [(name, data) for name, several in self._agent.get_new_notifs().items() for data in several]

    def close(self) -> None:
        """Deregister the pool and destroy the agent. No transfer may be in flight."""
        self._local_pages.release()
        self._local_probe.release()
        self._agent.deregister_memory(self._registration)
        self._agent.deregister_memory(self._probe_registration)
        self._local_pages = self._local_probe = self._registration = self._probe_registration = self._agent = None

    def leak(self, handles: list[Any]) -> None:
        """Keep the agent and the handles forever, because transfers in flight do not end; replaces `close`.

        Nothing is freed, not even when Python exits, because NIXL's and UCX's destructors would follow the pointers
        that those transfers still hold. No thread makes progress on them.
        """
        immortal = [self, *handles]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(immortal))

    def _seen(self, poll: Callable[[], str]) -> TransferState:
        try:
            state = poll()
        except Exception as error:
            log.info("a NIXL transfer failed: %r", error)
            return TransferState.FAILED
        return {"DONE": TransferState.DONE, "PROC": TransferState.IN_PROGRESS}.get(state, TransferState.FAILED)


def _page_list(base: int, page_bytes: int, pages: int, device_id: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return an array [pages, 3] with the address, size in bytes and device of each page."""
    table = np.empty((pages, 3), dtype=np.uint64)
    table[:, 0] = np.uint64(base) + np.arange(pages, dtype=np.uint64) * np.uint64(page_bytes)
    table[:, 1] = page_bytes
    table[:, 2] = device_id
    return table


def _parts(
    pages: np.ndarray[Any, np.dtype[np.uint64]], parts: Sequence[tuple[int, int]]
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return an array [pages · parts, 3] like `pages`, with the given (start, bytes) parts of each page in order."""
    table = np.repeat(pages, len(parts), axis=0)
    starts, sizes = np.asarray(parts, dtype=np.uint64).T
    table[:, 0] += np.tile(starts, len(pages))
    table[:, 1] = np.tile(sizes, len(pages))
    return table


def range_indices(
    pages: Sequence[int], orders: Sequence[int], ranges_per_order: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the indices of all ranges of the pages; `orders` has the order of each page, empty = the first."""
    numbers, per_page = np.asarray(pages, dtype=np.int32), sum(ranges_per_order)
    if per_page == 1:
        return numbers
    order = np.asarray(orders, dtype=np.int32) if orders else np.zeros(len(numbers), dtype=np.int32)
    counts = np.asarray(ranges_per_order, dtype=np.int32)
    starts = numbers * np.int32(per_page) + (np.cumsum(counts) - counts)[order]
    ranges = np.arange(counts.max(), dtype=np.int32)
    return (starts[:, None] + ranges)[ranges < counts[order, None]].astype(np.int32)
