"""TLS of clients at a router's ports: the authority that they trust, and the certificate that they present."""

from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509

from tandem.protocol.errors import InvalidArgument

CA, CERTIFICATE, KEY = "--tls-ca", "--tls-client-certificate", "--tls-client-key"


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Files in PEM format; "" = none."""

    ca: str = ""
    """Authorities of the router's certificate; without them, the connection has no TLS."""
    certificate: str = ""
    """The client's certificate, for a router that requires one."""
    key: str = ""
    """Its key."""
    pinned: str = ""
    """The certificate of a router on this host, which is trusted without `ca`, whatever address it is for."""

    @property
    def target_name(self) -> str:
        """The name to expect in the router's certificate instead of its address; "" = the address."""
        if self.ca or not self.pinned:
            return ""
        certificate = x509.load_pem_x509_certificate(_read(CA, self.pinned))
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return ""
        return str(next(iter(names)).value)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials of a channel, None without TLS; InvalidArgument names the option of a wrong file."""
        if bool(self.certificate) != bool(self.key):
            missing, given = (KEY, CERTIFICATE) if self.certificate else (CERTIFICATE, KEY)
            raise InvalidArgument(missing, f"is missing; it belongs to {given}")
        trusted = self.ca or self.pinned
        if not trusted:
            if self.certificate:
                raise InvalidArgument(CA, f"is missing; without it, {CERTIFICATE} is not used")
            return None
        shown = (_read(KEY, self.key), _read(CERTIFICATE, self.certificate)) if self.certificate else (None, None)
        return grpc.ssl_channel_credentials(_read(CA, trusted), *shown)


def _read(option: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InvalidArgument(option, f"cannot read {file} ({error.strerror})") from None


NO_TLS = ClientTls()
