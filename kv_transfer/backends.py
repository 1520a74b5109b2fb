"""Which transfers this machine can do, and the listener to them."""

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kv_transfer.base import NoticeHandler, Transport
from kv_transfer.layout import KVLayout
from kv_transfer.nixl_backend.agent import load_nixl
from kv_transfer.nixl_backend.transport import NixlTransport
from wire.errors import InvalidArgument, TandemError
from wire.messages import PeerRef

RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class BackendReport:
    """What `tandem doctor` prints of transfers: NIXL's package and plug-ins, RDMA devices of this host, and the reason
    in `error` ("" = none) when NIXL cannot be used."""

    package: str
    plugins: tuple[str, ...]
    rdma_devices: tuple[str, ...]
    error: str


def open_transport(
    kind: str,
    layout: KVLayout,
    me: PeerRef,
    on_notice: NoticeHandler,
    *,
    trusted_network: bool = False,
) -> Transport:
    """A transport over the pool at `layout`; the caller closes it before the pool's memory goes. Peers are on this
    host, and nothing listens to a network, unless that is a `trusted_network`.

    InvalidArgument for an unknown kind, or a UCX_TLS that asks for a network all the same; FailedPrecondition when its
    package cannot be imported; TransferFailed when the pool cannot be registered.
    """
    if kind != "nixl":
        raise InvalidArgument("transfer", f"`{kind}` is unknown; the one back end is `nixl`")
    return NixlTransport(layout, me, on_notice, trusted_network=trusted_network)


def available_backends() -> BackendReport:
    """Look at this machine; never raises."""
    devices = tuple(sorted(path.name for path in RDMA_DEVICES.iterdir())) if RDMA_DEVICES.is_dir() else ()
    try:
        nixl = load_nixl()
    except TandemError as error:
        return BackendReport("", (), devices, error.message)
    package = nixl.__name__.replace("_", "-")
    try:
        package = f"{package} {version(package)}"
        agent = nixl.nixl_agent(f"doctor/{os.getpid()}", nixl.nixl_agent_config(False, backends=[]))
        return BackendReport(package, tuple(sorted(agent.get_plugin_list())), devices, "")
    except (PackageNotFoundError, RuntimeError) as error:
        return BackendReport(package, (), devices, f"NIXL cannot be used: {error}")
