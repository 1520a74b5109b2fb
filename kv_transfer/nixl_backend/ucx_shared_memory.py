"""The UCX transports that are allowed without a trusted network: no other user or host can reach memory through them.

UCX's TCP and RDMA transports listen on a network. An incoming active message may request a write to any address of the
process, and UCX carries it out for any connected peer, without a key.

NIXL requests endpoints from UCX that detect a peer's death. UCX's shared-memory transports can do so, but declare it
only if `UCX_POSIX_ERROR_HANDLING` or `UCX_SYSV_ERROR_HANDLING` is set. If `UCX_TLS` alone is set to exclude TCP, UCX
therefore fails with "no peer failure handler".

So within one host, UCX uses only these transports: `posix` for its messages, whose segments are files without a name
that only a process of the same user reaches through /proc (those of `sysv` would be open to the user's group); `cma`
for pages, which the kernel allows only to the same user; and `cuda` for pages on GPUs. All others need a trusted
network.
"""

from collections.abc import Mapping

import psutil

from tandem.protocol.errors import InvalidArgument

WITHIN_A_HOST = frozenset(
    {"self", "loopback", "sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem"}
    | {"cuda", "cuda_copy", "cuda_ipc", "gdr_copy"}
)
"""Values in `UCX_TLS` that name transports without network access."""

TRANSPORTS = "posix,cma,self,cuda"
_WITHIN_A_HOST_SETTINGS = {
    "UCX_TLS": TRANSPORTS,
    "UCX_POSIX_ERROR_HANDLING": "y",
    "UCX_SYSV_ERROR_HANDLING": "y",
    # With keepalive, a connection begins with a request that UCX answers by opening the sender's segment. If the sender
    # has ended meanwhile, UCX 1.23 crashes (`ucp_ep_set_lanes_failed` of an endpoint without a configuration). Without
    # keepalive there is no such request. `PoolAgent.fail_if_dead` replaces it.
    "UCX_KEEPALIVE_INTERVAL": "inf",
}
TCP_PORTS = "UCX_TCP_PORT_RANGE"
"""The environment variable with the port range on which UCX's TCP transport may listen, e.g. 21000-21099.

A firewall must allow these ports.
"""


def check_transports(environment: Mapping[str, str], *, trusted_network: bool) -> None:
    """Raise InvalidArgument if the user's `UCX_TLS` requests a network transport without a trusted network."""
    chosen = environment.get("UCX_TLS", TRANSPORTS)
    beyond = [name for name in chosen.split(",") if name.strip().lower() not in WITHIN_A_HOST]
    if beyond and not trusted_network:
        raise InvalidArgument(
            "UCX_TLS",
            f"{chosen} lets UCX listen to a network ({', '.join(beyond)}), where anyone who reaches it can write into"
            " workers' memory; unset it, or give --trusted-network if only workers can reach it",
        )


def ucx_settings(*, trusted_network: bool) -> dict[str, str]:
    """Return the environment variables to set for UCX. Variables that the user has set take precedence."""
    return {} if trusted_network else dict(_WITHIN_A_HOST_SETTINGS)


def listening(process: int | None = None) -> frozenset[str]:
    """Return host:port of each TCP socket on which a process (default: this one) listens.

    The result is empty if the kernel does not report the sockets.
    """
    try:
        sockets = psutil.Process(process).net_connections("tcp")
    except (psutil.Error, OSError):
        return frozenset()
    return frozenset(
        f"{connection.laddr[0]}:{connection.laddr[1]}"
        for connection in sockets
        if connection.status == psutil.CONN_LISTEN
    )
