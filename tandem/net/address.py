"""Formats and parses addresses of servers."""

import ipaddress
import socket


def address_of(host: str, port: int) -> str:
    """Return the address as host:port; an IPv6 address gets brackets, as in URLs and gRPC."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Split an address of the form host:port. Raises ValueError if it has no port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Return True if a server that listens on `host`, an address or a name, can be reached from this machine only."""
    try:
        addresses = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback for *_, where in addresses)
