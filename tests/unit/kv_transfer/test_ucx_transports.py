"""The UCX transport to each peer, and the warnings about slow ones."""

import logging

import pytest

from kv_transfer.layout import KVLayout
from kv_transfer.nixl_backend.ucx_transports import UcxTransports, host_id, slow_transport
from tandem.protocol.messages import PeerDescription, PeerRef
from tests.unit.kv_transfer.test_nixl_wire import PUT, table

LAYOUT = KVLayout(0, 8, 2, 2, 16, (64, 64), 4, "float32")
HERE = "the host of this worker"
CMA = table("prefill-0/1", PUT, "| 0..inf | zero-copy | cma/memory |")
TCP_HERE = table("prefill-0/1", PUT, "| 0..inf | zero-copy | tcp/lo |")
TCP_AWAY = TCP_HERE.replace("intra-node", "inter-node")
RDMA_AWAY = TCP_AWAY.replace("tcp/lo", "rc_mlx5/mlx5_0:1")


def peer(worker_id: str, host: str = HERE, memory: str = "DRAM") -> PeerDescription:
    return PeerDescription(PeerRef(worker_id, 1), b"", 0, LAYOUT.page_bytes, 8, 0, memory, host)


def wires() -> UcxTransports:
    return UcxTransports("UCX", "prefill-0/1", LAYOUT, HERE)


def test_each_peer_is_logged_once_with_its_wire(caplog: pytest.LogCaptureFixture) -> None:
    known = wires()
    assert (known.name, known.warnings) == ("UCX", ())
    with caplog.at_level(logging.INFO):
        known.learn(peer("decode-0"), CMA, {})
        known.learn(peer("decode-1"), CMA, {})
    assert [record.message for record in caplog.records] == [
        "KV pages go to decode-0 by UCX (cma)",
        "KV pages go to decode-1 by UCX (cma)",
    ]
    assert (known.name, known.warnings) == ("UCX (cma)", ())


@pytest.mark.parametrize("ucx_log", [CMA + TCP_AWAY, TCP_AWAY + CMA])
def test_peers_on_this_host_and_on_others_have_tables_of_their_own(ucx_log: str) -> None:
    known = wires()
    known.learn(peer("decode-1", "another host"), ucx_log, {})
    known.learn(peer("decode-0"), ucx_log, {})
    assert known.name == "UCX (cma to decode-0, tcp to decode-1)"
    assert known.kinds == "UCX (cma, tcp)"
    assert known.warnings == ()
    known.forget(PeerRef("decode-1", 1))
    assert known.name == "UCX (cma)"
    assert known.kinds == "UCX (cma)"
    known.forget(PeerRef("decode-1", 1))


def test_what_metrics_say_stays_the_same_as_peers_come_and_go() -> None:
    known = wires()
    known.learn(peer("decode-0"), CMA + TCP_AWAY, {})
    seen = set()
    for number in range(1, 9):
        known.learn(peer(f"decode-{number}", "another host"), CMA + TCP_AWAY, {})
        seen.add(known.kinds)
        known.forget(PeerRef(f"decode-{number - 2}", 1))
    assert seen == {"UCX (cma, tcp)", "UCX (tcp)"}


def test_a_process_that_writes_to_itself_is_on_this_host() -> None:
    known = wires()
    known.learn(peer("decode-0"), CMA.replace("intra-node", "self") + TCP_AWAY, {})
    assert known.name == "UCX (cma)"


def test_hosts_that_ucx_judges_otherwise_still_have_a_wire() -> None:
    """The peers are in two network namespaces of one machine."""
    known = wires()
    known.learn(peer("decode-0"), TCP_AWAY, {})
    assert known.name == "UCX (tcp)"


def test_tcp_on_one_host_is_a_loud_warning(caplog: pytest.LogCaptureFixture) -> None:
    known = wires()
    known.learn(peer("decode-0"), TCP_HERE, {})
    (warning,) = known.warnings
    assert "decode-0 over TCP though both workers are on this host" in warning
    assert "/dev/shm" in warning
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", warning)]
    known.forget(PeerRef("decode-0", 1))
    assert known.warnings == ()


@pytest.mark.parametrize(
    ("wire", "near", "on_gpu", "words"),
    [
        ("tcp", True, True, "CUDA IPC"),
        ("tcp", False, True, "nvidia-peermem"),
        ("rc_mlx5+tcp", False, True, "RDMA"),
        ("tcp", True, False, "/dev/shm"),
    ],
)
def test_the_warning_says_what_to_do(wire: str, near: bool, on_gpu: bool, words: str) -> None:
    assert words in slow_transport(wire, "go to decode-0", near=near, on_gpu=on_gpu, environment={})
    asked = slow_transport(wire, "go to decode-0", near=near, on_gpu=on_gpu, environment={"UCX_TLS": "tcp,cuda_copy"})
    assert "UCX_TLS=tcp,cuda_copy asks for it: unset it" in asked


@pytest.mark.parametrize(
    ("wire", "near", "on_gpu"),
    [
        ("tcp", False, False),
        ("cma", True, False),
        ("cuda_ipc", True, True),
        ("rc_mlx5", False, True),
        ("", True, False),
    ],
)
def test_what_is_as_fast_as_it_can_be_is_no_warning(wire: str, near: bool, on_gpu: bool) -> None:
    assert slow_transport(wire, "go to decode-0", near=near, on_gpu=on_gpu, environment={}) == ""


def test_an_unknown_transport_is_a_warning_where_pages_are_on_a_gpu() -> None:
    known = wires()
    known.learn(peer("decode-0", memory="VRAM"), "", {})
    assert "does not name" in known.warnings[0]


def test_pages_on_either_s_gpu_count() -> None:
    known = wires()
    known.learn(peer("decode-0", "another host", memory="VRAM"), TCP_AWAY, {})
    assert "pages are on a GPU" in known.warnings[0]
    known.learn(peer("decode-0", "another host", memory="VRAM"), RDMA_AWAY, {})
    assert known.warnings == ()


def test_a_peer_that_does_not_say_where_it_lives_is_not_judged_by_it() -> None:
    known = wires()
    known.learn(peer("decode-0", ""), TCP_HERE, {})
    assert (known.name, known.warnings) == ("UCX (tcp)", ())


def test_an_unknown_wire_is_not_guessed(caplog: pytest.LogCaptureFixture) -> None:
    known = wires()
    with caplog.at_level(logging.INFO):
        known.learn(peer("decode-0"), "", {})
    assert known.name == "UCX"
    assert "UCX does not report the transport" in caplog.text


def test_a_host_is_the_same_each_time() -> None:
    assert host_id() == host_id() != ""
