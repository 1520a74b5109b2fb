"""TLS for the ports that clients use: certificate, key, and an authority for client certificates, from files.

The files are read again after a change, and each new connection gets the current certificate. Connections between the
components of a cluster have another TLS configuration, see `mutual_tls.py`.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from tandem.logging.recurring import RECURRING
from tandem.net.security.watched_files import WatchedFiles
from tandem.protocol.errors import InvalidArgument
from tandem.settings.tls import TlsFiles

log = logging.getLogger(__name__)

CERTIFICATE, KEY, CLIENT_CA = "--tls-certificate", "--tls-key", "--tls-client-ca"


def tls_files(certificate: str, key: str, client_ca: str) -> TlsFiles | None:
    """Return the files that these options name; None if all are empty.

    Raises InvalidArgument if a required file is missing or cannot be used.
    """
    if not certificate and not key and not client_ca:
        return None
    for option, file in ((CERTIFICATE, certificate), (KEY, key)):
        if not file:
            raise InvalidArgument(option, f"is missing; {CERTIFICATE} and {KEY} belong together")
    ca = Path(client_ca).absolute() if client_ca else None
    files = TlsFiles(Path(certificate).absolute(), Path(key).absolute(), ca)
    load(files)
    return files


@dataclass(frozen=True, slots=True)
class Loaded:
    """The validated content of the TLS files."""

    context: ssl.SSLContext
    grpc: grpc.ServerCertificateConfiguration
    expires: datetime
    """The time at which the certificate expires."""


def load(files: TlsFiles) -> Loaded:
    """Read and check the files. Raises InvalidArgument, which names the option, if a file cannot be used."""
    certificate, key = _read(CERTIFICATE, files.certificate), _read(KEY, files.key)
    ca = None if files.client_ca is None else _read(CLIENT_CA, files.client_ca)
    expires = _check_pair(files, certificate, key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.certificate, files.key, password=b"")
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(CERTIFICATE, f"cannot use {files.certificate} with {files.key} ({error})") from None
    if ca is not None:
        try:
            context.load_verify_locations(cadata=ca.decode("ascii"))
        except (ssl.SSLError, ValueError):
            raise InvalidArgument(CLIENT_CA, f"{files.client_ca} has no certificate in PEM format") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return Loaded(context, grpc.ssl_server_certificate_configuration([(key, certificate)], ca), expires)


class ServerTls:
    """The TLS configuration of a process's listeners. Thread-safe: gRPC asks for the certificate in its own threads."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises InvalidArgument for files that cannot be used."""
        self._files = files
        self._lock = threading.Lock()
        self._watch = WatchedFiles(*files.all)
        self._loaded = load(files)
        self._given: grpc.ServerCertificateConfiguration | None = None
        """The configuration that gRPC uses for new connections."""

    def current(self) -> Loaded:
        """Return the TLS configuration from the files, which is loaded again if they have changed.

        If the changed files cannot be used, logs an error and returns the previous configuration.
        """
        with self._lock:
            return self._current()

    def http_context(self) -> ssl.SSLContext:
        """Return an SSL context for asyncio servers: each new connection gets the current certificate."""
        return _CurrentContext(lambda: self.current().context)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for one gRPC server: each new connection gets the current certificate."""
        self._given = self._loaded.grpc
        changed: Any = self._changed  # the stubs do not know that it may return None
        return grpc.dynamic_ssl_server_credentials(self._given, changed, self._files.client_ca is not None)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the certificate configuration for a new connection; None if gRPC has the current one already."""
        with self._lock:
            configuration = self._current().grpc
            if configuration is self._given:
                return None
            self._given = configuration
            return configuration

    def _current(self) -> Loaded:
        if self._watch.changed():
            try:
                self._loaded = load(self._files)
            except InvalidArgument as error:
                log.error("%s; the certificate that was read before stays in use", error, extra=RECURRING)
            else:
                log.info("read %s, which has changed; it ends on %s", self._files.certificate, self._loaded.expires)
        return self._loaded


class _CurrentContext(ssl.SSLContext):
    """An SSL context that delegates each new connection of an asyncio server to the current context."""

    _find: Callable[[], ssl.SSLContext]

    def __new__(cls, _find: Callable[[], ssl.SSLContext]) -> _CurrentContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, find: Callable[[], ssl.SSLContext]) -> None:
        self._find = find

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self._find().wrap_bio(*args, **kwargs)


def _read(option: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidArgument(option, f"cannot read {file} ({error.strerror})") from None


def _check_pair(files: TlsFiles, certificate: bytes, key: bytes) -> datetime:
    """Return the time at which the certificate expires.

    Raises InvalidArgument unless the certificate is valid now and belongs to the key.
    """
    try:
        first = x509.load_pem_x509_certificate(certificate)
    except ValueError:
        raise InvalidArgument(CERTIFICATE, f"{files.certificate} has no certificate in PEM format") from None
    try:
        public = serialization.load_pem_private_key(key, None).public_key()
    except TypeError:
        raise InvalidArgument(KEY, f"{files.key} is encrypted; store it without a password") from None
    except ValueError:
        raise InvalidArgument(KEY, f"{files.key} has no private key in PEM format") from None
    if first.public_key() != public:
        raise InvalidArgument(KEY, f"{files.key} is not the key of {files.certificate}; give both of one pair")
    now = datetime.now(UTC)
    if not first.not_valid_before_utc <= now <= first.not_valid_after_utc:
        begins, ends = first.not_valid_before_utc, first.not_valid_after_utc
        message = f"{files.certificate} is valid from {begins:%Y-%m-%d} to {ends:%Y-%m-%d}, not today; renew it"
        raise InvalidArgument(CERTIFICATE, message)
    return first.not_valid_after_utc
