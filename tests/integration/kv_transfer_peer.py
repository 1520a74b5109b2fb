"""The other end of the NIXL tests: a process with a pool and a transport, controlled by JSON lines on stdin.

Usage: kv_transfer_peer.py WORKER_ID INCARNATION PAGES PAGE_FLOATS SEED DEVICE
"""

import hashlib
import json
import os
import sys
import time
from typing import Any

import numpy as np

from kv_transfer.backends import open_transport
from kv_transfer.base import PageWrite
from kv_transfer.layout import KVLayout
from kv_transfer.nixl_backend.transport import NixlTransport
from tandem.protocol.messages import Lease, PeerDescription, PeerRef, TransferNotice


def pool_of(seed: int, pages: int, page_floats: int) -> np.ndarray:
    """Returns [pages, page_floats] float32, the same in every process."""
    return np.random.default_rng(seed).random((pages, page_floats), dtype=np.float32)


def on_device(pool: np.ndarray, device: str) -> Any:
    """Returns the array itself on `cpu`, else a tensor of the same values there."""
    if device == "cpu":
        return pool
    import torch  # slow, and only a GPU needs it

    return torch.from_numpy(pool).to(device)


def layout_of(pool: Any) -> KVLayout:
    """Returns the layout of the pool as pages of one layer, one head and one token per page."""
    pages, page_floats = pool.shape
    if isinstance(pool, np.ndarray):
        return KVLayout(pool.ctypes.data, pages, 1, 1, 1, (page_floats // 2,) * 2, 4, "float32")
    return KVLayout(pool.data_ptr(), pages, 1, 1, 1, (page_floats // 2,) * 2, 4, "float32", "VRAM", pool.device.index)


def digest(pages: Any) -> str:
    host = pages if isinstance(pages, np.ndarray) else pages.cpu().numpy()
    return hashlib.sha256(host.tobytes()).hexdigest()


def looks_of(transport: NixlTransport) -> list[None]:
    """Returns a list that gets one entry for each poll for notices from now on."""
    looks: list[None] = []
    notices = transport._agent.notices

    def counted() -> Any:
        looks.append(None)
        return notices()

    transport._agent.notices = counted  # type: ignore[method-assign]
    return looks


def main() -> None:
    worker_id, (incarnation, pages, page_floats, seed), device = sys.argv[1], map(int, sys.argv[2:6]), sys.argv[6]
    pool = on_device(pool_of(seed, pages, page_floats), device)
    layout = layout_of(pool)
    notices: list[dict[str, object]] = []

    def on_notice(notice: TransferNotice) -> None:
        """Records a notice; in these tests `token_hash` is the hash of the pages from number `first_token_id` on."""
        first = notice.first_token_id
        whole = digest(pool[first : first + notice.pages]) == notice.token_hash.hex()
        notices.append({"epoch": notice.lease.epoch, "whole": whole})

    trusted = "UCX_TLS" in os.environ  # tests that set it ask for TCP
    me = PeerRef(worker_id, incarnation)
    transport = open_transport("nixl", layout, me, on_notice, trusted_network=trusted)
    assert isinstance(transport, NixlTransport)
    looks = looks_of(transport)
    mine = transport.describe()
    hello = {"metadata": mine.agent_metadata.hex(), "base": layout.base_address}
    print(json.dumps(hello | {"process": mine.process, "probe": mine.probe_address}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "know":
                peer = command["peer"]
                metadata, memory = bytes.fromhex(peer["metadata"]), (peer["base"], layout.page_bytes, pages, 0)
                ref = PeerRef(peer["worker_id"], peer["incarnation"])
                transport.add_peer(PeerDescription(ref, metadata, *memory, peer["memory"], peer["host"]))
                answer: object = None
            case "write":
                notice = TransferNotice(Lease("r", 1, 1), transport.describe().peer, b"", pages, 0, 1)
                transport.write(PageWrite(ref, range(pages), range(pages), notice), deadline_s=60.0)
                answer = None
            case "moving":
                answer = len(transport._writes.handles)
            case "wire":
                answer = [transport.transport_name(), *transport.warnings()]
            case "expect":
                transport.expect(command["leases"])
                answer = None
            case "digests":
                answer = [digest(page) for page in pool]
            case "notices":
                answer = notices
            case "looks":
                looks.clear()
                began = time.monotonic()
                time.sleep(command["seconds"])
                answer = [len(looks), time.monotonic() - began]
        print(json.dumps(answer), flush=True)
    transport.close()


if __name__ == "__main__":
    main()
