"""The connection to one router: its channel's options, the metadata of calls, and their errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tandem.net.rpc import AUTHORIZATION, CHANNEL_OPTIONS, ERROR_CODE, error_of
from tandem.protocol.errors import InvalidArgument, TandemError, Unauthenticated, Unavailable
from tandem.settings.parsing import check_key


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to a router, or to a proxy before it; files are in PEM."""

    roots: Path | None = None
    """The certificates of the authorities that are trusted; None = those of gRPC."""
    certificate: Path | None = None
    """The client's own certificate chain, for servers that ask for one."""
    key: Path | None = None
    """The private key of `certificate`."""
    server_name: str = ""
    """The name that the server's certificate must have; "" = that of the address."""


class Connection:
    """The settings of a connection, from which either client opens its channel."""

    def __init__(self, address: str, api_key: str, tls: Tls | None) -> None:
        """Checks the settings; InvalidArgument for a key that no call could carry, or a file that cannot be read."""
        if api_key:
            check_key("api_key", api_key)
        self.address = address
        self.credentials = None if tls is None else _credentials(tls)
        self.metadata = ((AUTHORIZATION, f"Bearer {api_key}"),) if api_key else ()
        """The metadata of every call."""
        name = tls.server_name if tls is not None else ""
        self.options: list[tuple[str, Any]] = [*CHANNEL_OPTIONS]
        if name:
            self.options.append(("grpc.ssl_target_name_override", name))

    def error(self, error: Any, *, begun: bool = False) -> TandemError:
        """Returns the typed error of a failed call; `begun` says that a part of an answer had come."""
        router = f"the router at {self.address}"
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            if self.metadata:
                return Unauthenticated(f"{router} does not accept this API key; give another api_key")
            return Unauthenticated(f"{router} asks for an API key; give api_key")
        own = any(name == ERROR_CODE for name, _ in error.trailing_metadata() or ())
        if own or error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN):
            return error_of(error, router)
        if begun:
            return Unavailable(f"lost {router} before the answer's end; send the request again")
        return Unavailable(f"cannot reach {router} ({error.details()}); check that it runs, its address and TLS")


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    if (tls.certificate is None) != (tls.key is None):
        raise InvalidArgument("tls", "has a certificate without its key, or a key without certificate; give both")
    return grpc.ssl_channel_credentials(_read(tls.roots), _read(tls.key), _read(tls.certificate))


def _read(file: Path | None) -> bytes | None:
    try:
        return None if file is None else Path(file).read_bytes()
    except OSError as error:
        raise InvalidArgument("tls", f"{file} cannot be read ({error.strerror}); give a PEM file") from error
