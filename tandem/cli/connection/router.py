"""A command's connection to a router: a client whose errors name options, and a query of the router's state."""

from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from tandem.client import Client, DeadlineExceeded, InvalidArgument, Options, Tls, Unavailable
from tandem.client.connection import Wording
from tandem.protocol.generated.tandem.v1 import inference_pb2
from tandem.protocol.messages import INT32_MAX, SEED_MAX, TEMPERATURE_MAX

COMMANDS = Wording(
    key_name="--api-key",
    no_key="{router} asks for an API key; give --api-key or --api-key-file (TANDEM_API_KEY)",
    wrong_key="{router} does not accept this API key; give --api-key or --api-key-file (TANDEM_API_KEY)",
    unreachable="cannot reach {router}; is `tandem up` running there?",
    lost="lost {router} before the answer's end; is `tandem up` running?",
)
"""The texts of client errors on the command line; they name options."""
CA, CERTIFICATE, KEY = "--tls-ca", "--tls-client-certificate", "--tls-client-key"
_VIEW_S = 5.0
"""Deadline of the calls that query a router's state, in seconds."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of a command; greedy by default. A parameter that is None has the router's default."""

    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Validate the parameters, with the same limits as the router.

        Raises InvalidArgument, which names the option and its limits.
        """
        if self.max_tokens is not None and not 1 <= self.max_tokens <= INT32_MAX:
            raise InvalidArgument("--max-tokens", f"{self.max_tokens} is not between 1 and {INT32_MAX}")
        if not 0 <= self.temperature <= TEMPERATURE_MAX:
            raise InvalidArgument("--temperature", f"{self.temperature:g} is not between 0 and {TEMPERATURE_MAX:g}")
        if self.seed is not None and not 0 <= self.seed <= SEED_MAX:
            raise InvalidArgument("--seed", f"{self.seed} is not between 0 and {SEED_MAX}")

    def options(self) -> Options:
        """Return the parameters as options of a request."""
        options = Options(temperature=self.temperature)
        if self.max_tokens is not None:
            options["max_tokens"] = self.max_tokens
        if self.seed is not None:
            options["seed"] = self.seed
        return options


@dataclass(frozen=True, slots=True)
class ServerView:
    """The state that a router reports: its workers, its load and its model."""

    info: inference_pb2.GetServerInfoResponse
    loads: inference_pb2.GetLoadsResponse
    model: inference_pb2.GetModelInfoResponse


def router_client(address: str, api_key: str = "", tls: Tls | None = None, timeout_s: float | None = None) -> Client:
    """Return a client whose errors name command-line options."""
    return Client(address, api_key=api_key, tls=tls, timeout_s=timeout_s, wording=COMMANDS)


def view_of(address: str, api_key: str = "", tls: Tls | None = None) -> ServerView:
    """Query the router's workers, load and model. Raises Unavailable if it does not respond within five seconds."""
    with router_client(address, api_key, tls, _VIEW_S) as client:
        try:
            return ServerView(client.server(), client.loads(), client.model())
        except DeadlineExceeded:
            raise _silent(address) from None


def model_of(address: str, api_key: str = "", tls: Tls | None = None) -> inference_pb2.GetModelInfoResponse:
    """Query the router's model, which every API key may read.

    Raises Unavailable if the router does not respond within five seconds.
    """
    with router_client(address, api_key, tls, _VIEW_S) as client:
        try:
            return client.model()
        except DeadlineExceeded:
            raise _silent(address) from None


def tls_of(ca: str, certificate: str, key: str, pinned: str = "") -> Tls | None:
    """Return the TLS settings from the PEM files that options name, or None if neither `ca` nor `pinned` is given.

    A file that is not given is "". `pinned` is the certificate of a router on this host. Without `ca`, this certificate
    is trusted, and the name in it need not be the router's address. Raises InvalidArgument, which names the option of a
    wrong file.
    """
    if bool(certificate) != bool(key):
        missing, given = (KEY, CERTIFICATE) if certificate else (CERTIFICATE, KEY)
        raise InvalidArgument(missing, f"is missing; it belongs to {given}")
    if not ca and not pinned:
        if certificate:
            raise InvalidArgument(CA, f"is missing; without it, {CERTIFICATE} is not used")
        return None
    return Tls(
        roots=_readable(CA, ca or pinned),
        certificate=_readable(CERTIFICATE, certificate) if certificate else None,
        key=_readable(KEY, key) if key else None,
        server_name="" if ca else _name_in(pinned),
    )


def _silent(address: str) -> Unavailable:
    return Unavailable(COMMANDS.unreachable.format(router=f"the router at {address}"))


def _readable(option: str, file: str) -> Path:
    try:
        with Path(file).open("rb"):
            return Path(file)
    except OSError as error:
        raise InvalidArgument(option, f"cannot read {file} ({error.strerror})") from None


def _name_in(file: str) -> str:
    """Return the first host name of a certificate, or "" if it has none."""
    certificate = x509.load_pem_x509_certificate(_readable(CA, file).read_bytes())
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ""
    return str(next(iter(names)).value)
