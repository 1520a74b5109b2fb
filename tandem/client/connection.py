"""The connection to one router: its gRPC channel, the metadata of calls, and the conversion of their errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from tandem.net.rpc import AUTHORIZATION, CHANNEL_OPTIONS, ERROR_CODE, error_of, open_client_channel
from tandem.protocol.errors import InvalidArgument, TandemError, Unauthenticated, Unavailable
from tandem.settings.parsing import check_key


@dataclass(frozen=True, slots=True)
class Tls:
    """The TLS settings for a router, or for a proxy in front of it; all files are in PEM format."""

    roots: Path | None = None
    """File with the certificates of trusted authorities; None = gRPC's default authorities."""
    certificate: Path | None = None
    """File with the client's own certificate chain, for servers that require one (mTLS)."""
    key: Path | None = None
    """File with the private key of `certificate`."""
    server_name: str = ""
    """The name for which the server's certificate must be issued; "" = the host in the address."""


@dataclass(frozen=True, slots=True)
class Wording:
    """The texts of the client's own errors, and `key_name`, the API key's name in the error for an invalid key.

    In the texts, `{router}` is replaced by "the router at ADDRESS", and `{details}` by gRPC's error message.
    """

    key_name: str = "api_key"
    no_key: str = "{router} asks for an API key; give api_key"
    wrong_key: str = "{router} does not accept this API key; give another api_key"
    unreachable: str = "cannot reach {router} ({details}); check that it runs, its address and TLS"
    lost: str = "lost {router} before the answer's end; send the request again"


PYTHON = Wording()
"""The error messages of the Python client; the command line uses its own `Wording`."""


class Connection:
    """The validated settings of a connection, with which a client opens its channel."""

    def __init__(self, address: str, api_key: str, tls: Tls | None, wording: Wording = PYTHON) -> None:
        """Check the settings.

        Raises InvalidArgument for an API key that cannot be sent, or for a file that cannot be read.
        """
        if api_key:
            check_key(wording.key_name, api_key)
        self.address = address
        self.metadata = ((AUTHORIZATION, f"Bearer {api_key}"),) if api_key else ()
        """The metadata of every call: the API key, if there is one."""
        self._credentials = None if tls is None else _credentials(tls)
        self._server_name = tls.server_name if tls is not None else ""
        self._wording = wording

    def open(self) -> grpc.Channel:
        """Open a channel that several threads may use."""
        if self._credentials is None:
            return grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        name = [("grpc.ssl_target_name_override", self._server_name)] if self._server_name else []
        return grpc.secure_channel(self.address, self._credentials, options=[*CHANNEL_OPTIONS, *name])

    def open_async(self) -> grpc.aio.Channel:
        """Open a channel for the running event loop."""
        return open_client_channel(self.address, credentials=self._credentials, target_name=self._server_name)

    def error(self, error: Any, *, begun: bool = False) -> TandemError:
        """Return the TandemError for a failed call; `begun` is True if a part of an answer had already arrived."""
        router, wording = f"the router at {self.address}", self._wording
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated((wording.wrong_key if self.metadata else wording.no_key).format(router=router))
        own = any(name == ERROR_CODE for name, _ in error.trailing_metadata() or ())
        if own or error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN):
            return error_of(error, router)
        return Unavailable(
            (wording.lost if begun else wording.unreachable).format(router=router, details=error.details())
        )


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    if (tls.certificate is None) != (tls.key is None):
        raise InvalidArgument("tls", "has a certificate without its key, or a key without certificate; give both")
    return grpc.ssl_channel_credentials(_read(tls.roots), _read(tls.key), _read(tls.certificate))


def _read(file: Path | None) -> bytes | None:
    try:
        return None if file is None else Path(file).read_bytes()
    except OSError as error:
        raise InvalidArgument("tls", f"{file} cannot be read ({error.strerror}); give a PEM file") from error
