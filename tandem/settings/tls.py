"""The TLS files of the ports for clients."""

from dataclasses import dataclass
from pathlib import Path

from tandem.settings.parsing import absolute
from tandem.settings.setting import Settings, Topic, required, setting


@dataclass(frozen=True, slots=True)
class TlsFiles(Settings):
    """The paths of PEM files: the server's certificate, its private key and the authorities of clients."""

    certificate: Path = required(
        help="PEM file with the certificate of both ports for clients; read again when it changes.",
        topic=Topic.ACCESS,
        option="tls-certificate",
        parse=absolute,
    )
    """The server's certificate, followed by the intermediate certificates up to its authority."""
    key: Path = required(help="PEM file with its key.", topic=Topic.ACCESS, option="tls-key", parse=absolute)
    """The unencrypted private key of the certificate."""
    client_ca: Path | None = setting(
        None,
        help="PEM file with authorities; clients then need a certificate of one of them (mTLS).",
        topic=Topic.ACCESS,
        option="tls-client-ca",
        parse=absolute,
    )
    """The authorities whose client certificates are accepted (mTLS); None = clients need no certificate."""

    @property
    def all(self) -> tuple[Path, ...]:
        """All configured files."""
        return (self.certificate, self.key, *([self.client_ca] if self.client_ca else ()))
