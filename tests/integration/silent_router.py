"""A router that promises prompts to a worker and stops responding."""

from __future__ import annotations

from typing import Any

from tandem.protocol.generated.tandem.v1 import types_pb2, worker_pb2, worker_pb2_grpc

PAGE_TOKENS = 16
_LARGEST_PAGES, _SMALL_PAGES, _SPARE_PAGES = 400, 3, 2
_ME, _ANSWER = "silent-router", types_pb2.SamplingParams(max_tokens=4, top_p=1.0)


class SilentRouter:
    """Attaches, promises prompts to the prefill worker, and sends nothing more.

    In the end the writer reports that it is quiescent: while its process lives, nothing else frees the pages.
    """

    def __init__(self, cluster: Any) -> None:
        of_role = {member.role: member for member in cluster.members()}
        self.writer, self.reader = of_role["prefill"], of_role["decode"]
        self._prefill_peer = {"prefill": self.writer.peer}
        self._channel_to = cluster.channel
        self._pages = cluster.inspect_worker(self.reader.peer.worker_id).pages_total - _SPARE_PAGES
        self._leases: list[tuple[types_pb2.Lease, range]] = []

    def __enter__(self) -> SilentRouter:
        self._channels = [self._channel_to(worker.address) for worker in (self.writer, self.reader)]
        self._prefill, self._decode = map(worker_pb2_grpc.WorkerStub, self._channels)
        self._events = self._decode.Attach(worker_pb2.AttachRequest(router_id=_ME))
        return self

    def __exit__(self, *_: object) -> None:
        for lease, _ in self._leases:
            self._decode.ReleaseLease(worker_pb2.ReleaseLeaseRequest(lease=lease, **self._prefill_peer), timeout=60)
        self._events.cancel()
        for channel in self._channels:
            channel.close()

    def reserve(self) -> None:
        """Promises all pages but a few, and allows the prompts' pages to be written."""
        for number, pages in enumerate([*_portions(self._pages - _SMALL_PAGES, _LARGEST_PAGES), _SMALL_PAGES]):
            prompt = range(1, pages * PAGE_TOKENS - _ANSWER.max_tokens)
            asked = self._request(worker_pb2.ReserveRequest, number, prompt, **self._prefill_peer)
            lease = self._decode.Reserve(asked, timeout=60).lease
            self._leases.append((lease, prompt))
            allocate_pages = worker_pb2.AllocatePagesRequest(lease=lease, pages=pages, **self._prefill_peer)
            assert self._decode.AllocatePages(allocate_pages, timeout=60).page_ids

    def start_handoff(self) -> None:
        """Prefills the last prompt, a small one, whose lease the prefill worker releases itself."""
        lease, prompt = self._leases.pop()
        number = len(self._leases)
        reader = self.reader
        there = worker_pb2.Destination(peer=reader.peer, address=reader.address, lease=lease)
        self._prefill.Prefill(self._request(worker_pb2.PrefillRequest, number, prompt, destination=there), timeout=60)

    def _request(self, kind: type[Any], number: int, prompt: range, **fields: Any) -> Any:
        ref = worker_pb2.RequestRef(request_id=f"silent-{number}", attempt=1)
        return kind(router_id=_ME, ref=ref, prompt_token_ids=prompt, sampling=_ANSWER, **fields)


def _portions(whole: int, largest: int) -> list[int]:
    return [min(largest, whole - start) for start in range(0, whole, largest)]
