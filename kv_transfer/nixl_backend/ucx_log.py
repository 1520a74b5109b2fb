"""Finds the UCX transport that carries KV pages, from UCX's log.

With `UCX_PROTO_INFO=y` UCX prints, at the first use of a peer, tables of the protocols that it chose:

    | prefill-0/1 intra-node cfg#1                                    |    (or `self`, or `inter-node`)
    | remote memory write by ucp_put*(multi) from host memory to host |
    | Range  | Description | Config                                   |
    | 0..inf | zero-copy   | cma/memory                               |

NIXL posts its writes with the `multi` flag, so the table of that operation under this worker's agent name describes the
pages that the agent writes. Tables of other operations do not count: TCP carries the notices even if cma carries the
pages. The log goes to an anonymous file in memory, which also keeps UCX's output off the terminal. If the user has set
`UCX_LOG_FILE` or turned off `UCX_PROTO_INFO`, or if no table matches, the transport is unknown.
"""

import ctypes
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_TABLE = re.compile(r"\[[^]]*\] \[[^]]*\]\s+[|+]")
_ROW = re.compile(r"\|\s*(\d+)([KMGT]?)(?:\.\.(?:(\d+)([KMGT]?)|(inf)))?\s*\|([^|]*)\|([^|]*)\|")
_WIRE = re.compile(r"([a-z][a-z0-9_]*)/[\w:.\-]+")
_NEAR, _FAR = ("intra-node", "self"), ("inter-node",)
_OPERATION = "remote memory write by ucp_put*(multi)"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def find_transport(log: str, agent: str, page_bytes: int, *, near: bool | None = None) -> str | None:
    """Return the transports, e.g. `cma`, that UCX's newest matching table names for writes of `page_bytes` by `agent`.

    `near` selects the tables: True = those for peers on this host, False = those for other hosts, None = all. If no
    selected table names a transport for this size, all tables of `agent` are searched. Returns None if none of them
    does.
    """
    places = () if near is None else _NEAR if near else _FAR
    heads = [*(f"| {agent} {place} " for place in places), f"| {agent} "]
    return next((wire for head in heads if (wire := _newest(log, head, page_bytes))), None)


def _newest(log: str, head: str, page_bytes: int) -> str | None:
    transports = None
    owner = ours = False
    for line in log.splitlines():
        if _TABLE.match(line) is None:
            owner = ours = False
        owner = head in line or (owner and " cfg#" not in line)
        if " by ucp_" in line:
            ours = owner and _OPERATION in line
        row = _ROW.search(line) if ours else None
        if row is not None and _covers(row, page_bytes):
            transports = "+".join(dict.fromkeys(_WIRE.findall(row[7]))) or transports
    return transports


def _covers(row: re.Match[str], size: int) -> bool:
    low = int(row[1]) * _UNITS[row[2]]
    if row[5]:
        return low <= size
    return low <= size <= (int(row[3]) * _UNITS[row[4]] if row[3] else low)


class UcxLog:
    """The log of UCX in this process, kept in memory. UCX opens its log once per process, so there is one instance."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: int | None = None
        self._libc: ctypes.CDLL | None = None

    @contextmanager
    def captured(self, settings: Mapping[str, str]) -> Iterator[None]:
        """Set the log's environment variables and `settings` for agents that are created in this context.

        Variables that the user has set stay. The added ones are removed from the environment at the end, so that child
        processes do not inherit them.
        """
        with self._lock:
            if self._file is None and "UCX_LOG_FILE" not in os.environ:
                self._file = os.memfd_create("tandem-ucx-log")
                self._libc = ctypes.CDLL(None)
            log_settings = {"UCX_LOG_FILE": f"/proc/self/fd/{self._file}", "UCX_PROTO_INFO": "y"}
            wanted = {**settings, **({} if self._file is None else log_settings)}
            added = {k: v for k, v in wanted.items() if k not in os.environ}
            os.environ.update(added)
            try:
                yield
            finally:
                for name in added:
                    del os.environ[name]

    def text(self) -> str:
        """Return UCX's log so far; empty if the user's settings send it elsewhere."""
        if self._file is None or self._libc is None:
            return ""
        self._libc.fflush(None)
        return os.pread(self._file, os.fstat(self._file).st_size, 0).decode(errors="replace")


UCX_LOG = UcxLog()
