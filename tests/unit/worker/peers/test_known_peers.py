"""The record of processes on the same host whose liveness a worker can check."""

import pytest

from kv_transfer.nixl_backend import processes
from tandem.protocol.messages import PeerDescription, PeerRef
from tandem.worker.peers.peers import RUNS_KEPT, SameHostPeers

FIRST = PeerRef("prefill-0", 1)


class Kernel(dict[str, bool]):
    """The kernel's reply about the liveness of each process."""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(processes, "process_alive", made.get)
    return made


def describe(peer: PeerRef, process: str, host: str = "here") -> PeerDescription:
    return PeerDescription(peer, b"", 0, 1, 1, 0, "DRAM", host, process)


def test_a_neighbour_lives_until_the_kernel_says_otherwise(kernel: Kernel) -> None:
    them = SameHostPeers("here")
    assert them.process_alive(FIRST) is None
    kernel["p"] = True
    them.add(describe(FIRST, "p"))
    assert them.process_alive(FIRST) is True
    them.add(describe(FIRST, "hidden"))
    assert them.process_alive(FIRST) is True, "what is known of it is not forgotten"
    kernel["p"] = False
    assert them.process_alive(FIRST) is False


def test_a_run_whose_successor_is_here_may_live_all_the_same(kernel: Kernel) -> None:
    them = SameHostPeers("here")
    kernel.update(old=True, new=True)
    them.add(describe(FIRST, "old"))
    them.add(describe(PeerRef("prefill-0", 2), "new"))
    kernel["new"] = False
    assert (them.process_alive(FIRST), them.process_alive(PeerRef("prefill-0", 2))) == (True, False)
    assert them.has(FIRST), "its pages are a near worker's, though its successor was faster than the news"
    assert them.has(PeerRef("prefill-0", 2))


@pytest.mark.parametrize(("here", "there"), [("here", "there"), ("", ""), ("here", "")])
def test_peers_on_another_or_an_unknown_host_are_not_on_the_same_host(kernel: Kernel, here: str, there: str) -> None:
    them = SameHostPeers(here)
    kernel["p"] = True
    them.add(describe(FIRST, "p", there))
    assert them.process_alive(FIRST) is None
    assert not them.has(FIRST)


def test_a_process_that_was_never_seen_alive_is_not_reported_dead(kernel: Kernel) -> None:
    """A kernel may hide other users' processes."""
    them = SameHostPeers("here")
    kernel["p"] = False
    them.add(describe(FIRST, "p"))
    assert them.process_alive(FIRST) is None
    assert them.has(FIRST)


def test_runs_of_long_ago_are_forgotten(kernel: Kernel) -> None:
    them = SameHostPeers("here")
    kernel["p"] = True
    for incarnation in range(1, RUNS_KEPT + 2):
        them.add(describe(PeerRef("prefill-0", incarnation), "p"))
    assert them.process_alive(FIRST) is None
    assert them.process_alive(PeerRef("prefill-0", 2)) is True
