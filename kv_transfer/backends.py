"""The transfer back ends of this machine, and the function that opens one."""

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kv_transfer.base import NoticeHandler, RankTransport
from kv_transfer.layout import KVLayout
from kv_transfer.nixl_backend.agent import load_nixl
from kv_transfer.nixl_backend.transport import NixlTransport
from tandem.protocol.errors import InvalidArgument, TandemError
from tandem.protocol.messages import PeerRef

RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class BackendReport:
    """The transfer section of `tandem doctor`'s report: NIXL's package and plug-ins, and the RDMA devices of this host.

    `error` has the reason why NIXL cannot be used; it is empty if NIXL can be used.
    """

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
) -> RankTransport:
    """Open a transport over the page pool that `layout` describes.

    The caller closes the transport before it frees the pool's memory. Without `trusted_network`, peers must be on this
    host and the transport listens on no network.

    Raises InvalidArgument for an unknown kind or a UCX_TLS that requests a network without `trusted_network`,
    FailedPrecondition if NIXL's package cannot be imported, and TransferFailed if the pool cannot be registered.
    """
    if kind != "nixl":
        raise InvalidArgument("transfer", f"`{kind}` is unknown; the one back end is `nixl`")
    return NixlTransport(layout, me, on_notice, trusted_network=trusted_network)


def available_backends() -> BackendReport:
    """Return a report on NIXL and the RDMA devices of this machine. Never raises."""
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
