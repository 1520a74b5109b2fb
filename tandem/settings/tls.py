"""The files of TLS at the ports for clients."""

from dataclasses import dataclass
from pathlib import Path

from tandem.settings.parsing import absolute
from tandem.settings.setting import Settings, Topic, required, setting


@dataclass(frozen=True, slots=True)
class TlsFiles(Settings):
    """Files in PEM format."""

    certificate: Path = required(
        help="PEM file with the certificate of both ports for clients; read again when it changes.",
        topic=Topic.ACCESS,
        option="tls-certificate",
        parse=absolute,
    )
    """The server's certificate, then those between it and its authority."""
    key: Path = required(help="PEM file with its key.", topic=Topic.ACCESS, option="tls-key", parse=absolute)
    """The key of the certificate, not encrypted."""
    client_ca: Path | None = setting(
        None,
        help="PEM file with authorities; clients then need a certificate of one of them (mTLS).",
        topic=Topic.ACCESS,
        option="tls-client-ca",
        parse=absolute,
    )
    """The authorities of clients' certificates, which every client must then present; None = clients need none."""

    @property
    def all(self) -> tuple[Path, ...]:
        """All files."""
        return (self.certificate, self.key, *([self.client_ca] if self.client_ca else ()))
