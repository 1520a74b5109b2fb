"""Command-line options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.help_text import further_option

if TYPE_CHECKING:
    from tandem.cli.connection.controller_client import ControllerClient
    from tandem.cli.connection.router import Sampling
    from tandem.client import Client, Tls

key_option = further_option("Keys and TLS")


def _one_of_several(context: typer.Context, parameter: typer.CallbackParam, key: str) -> str:
    """Return the API key to send: `key` or, if the environment variable gave it, the first of the keys in it.

    In the pod of `tandem up`, the variable contains all keys that the router accepts.
    """
    source = context.get_parameter_source(parameter.name or "")
    return (key.split() or [""])[0] if source is not None and source.name == "ENVIRONMENT" else key


Address = Annotated[
    str,
    typer.Option("--address", envvar="TANDEM_ADDRESS", help="The router's host:port; default: the running cluster."),
]
ApiKey = Annotated[
    str,
    key_option(
        "--api-key", envvar="TANDEM_API_KEY", callback=_one_of_several, help="API key for a router that requires one."
    ),
]
ApiKeyFile = Annotated[
    str,
    key_option("--api-key-file", envvar="TANDEM_API_KEY_FILE", help="File whose first key is used instead."),
]
TEMPERATURE_HELP = "0 = greedy, always the most likely token; higher = more varied."
Metrics = Annotated[
    str,
    typer.Option(
        "--metrics", envvar="TANDEM_METRICS", help="host:port of the metrics; default: the running cluster's."
    ),
]
MetricsKey = Annotated[
    str,
    key_option(
        "--metrics-key", envvar="TANDEM_METRICS_KEY", help="Key that opens metrics; default: the running cluster's."
    ),
]
MetricsKeyFile = Annotated[
    str, key_option("--metrics-key-file", envvar="TANDEM_METRICS_KEY_FILE", help="File with that key, used instead.")
]
Grace = Annotated[
    float, typer.Option("--grace", help="Seconds to finish running requests; the rest then continue on other workers.")
]


def checked_grace(grace: float) -> float:
    """Return `grace` in seconds. Raises InvalidArgument if it is negative or not a number."""
    from tandem.protocol.errors import InvalidArgument

    if not grace >= 0:
        raise InvalidArgument("--grace", f"{grace:g} is below 0")
    return grace


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The sampling options of a command."""

    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Maximum tokens to generate.")] = None
    temperature: Annotated[float, typer.Option("--temperature", help=TEMPERATURE_HELP)] = 0.0
    seed: Annotated[int | None, typer.Option("--seed", help="Makes sampling above temperature 0 reproducible.")] = None

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters. Raises InvalidArgument, which names the option and its limits."""
        from tandem.cli.connection.router import Sampling

        return Sampling(self.max_tokens, self.temperature, self.seed)


TlsCa = Annotated[
    str,
    key_option(
        "--tls-ca",
        envvar="TANDEM_TLS_CA",
        help="PEM file with the authority of a router's certificate, for TLS; the running cluster needs none.",
    ),
]
TlsClientCertificate = Annotated[
    str,
    key_option(
        "--tls-client-certificate",
        envvar="TANDEM_TLS_CLIENT_CERTIFICATE",
        help="PEM file with the certificate for a router that requires one.",
    ),
]
TlsClientKey = Annotated[
    str, key_option("--tls-client-key", envvar="TANDEM_TLS_CLIENT_KEY", help="PEM file with its key.")
]


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """The options that choose a router and the API key for it."""

    address: Address = ""
    api_key: ApiKey = field(default="", repr=False)
    api_key_file: ApiKeyFile = ""
    tls_ca: TlsCa = ""
    tls_client_certificate: TlsClientCertificate = ""
    tls_client_key: TlsClientKey = ""

    def client(self) -> Client:
        """Return a client of the given router, or of the newest running cluster's.

        Raises Unavailable if no cluster runs.
        """
        from tandem.cli.connection.router import router_client

        return router_client(*self.find())

    def find(self, *, reads: bool = False) -> tuple[str, str, Tls | None]:
        """Return the address, API key and TLS settings of the given router, or of the newest running cluster's.

        `reads` is True for a command that reads the load of all tenants. A tenant's key does not permit this, so for
        the newest running cluster the metrics key is then returned. Raises Unavailable if no cluster runs.
        """
        from tandem.cli.connection.router import tls_of
        from tandem.cli.connection.state import newest

        key = shown_key(self.api_key, self.api_key_file)
        files = self.tls_ca, self.tls_client_certificate, self.tls_client_key
        if self.address:
            return self.address, key, tls_of(*files)
        running = newest()
        key = running.metrics_key if reads and running.token else key
        return running.grpc, key, tls_of(*files, pinned=running.certificate)


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """The options that choose a controller and the cluster's secret for it."""

    controller_address: Annotated[
        str,
        typer.Option(
            "--controller",
            envvar="TANDEM_CONTROLLER",
            help="The controller's host:port; default: the running cluster's.",
        ),
    ] = ""
    token: Annotated[
        str,
        key_option(
            "--token", envvar="TANDEM_CLUSTER_TOKEN", help="The cluster's secret; default: the running cluster's."
        ),
    ] = field(default="", repr=False)
    token_file: Annotated[
        str,
        key_option("--token-file", envvar="TANDEM_CLUSTER_TOKEN_FILE", help="File with that secret, used instead."),
    ] = ""

    def client(self) -> ControllerClient:
        """Return a client of the given controller, or of the newest running cluster's.

        Raises Unavailable if no cluster runs.
        """
        from tandem.cli.connection.controller_client import ControllerClient
        from tandem.cli.connection.secret_files import one_key
        from tandem.cli.connection.state import newest

        token = one_key("--token-file", self.token, self.token_file)
        if self.controller_address:
            return ControllerClient(self.controller_address, token)
        running = newest()
        return ControllerClient(running.controller, token or running.token)


def shown_key(api_key: str, api_key_file: str) -> str:
    """Return the API key to send to a router. Raises InvalidArgument for a file without keys."""
    from tandem.cli.connection.secret_files import first_key

    return first_key("--api-key-file", api_key, api_key_file)


def metrics_server(address: str, key: str, key_file: str = "") -> tuple[str, str]:
    """Return the given metrics address and key, or those of the newest running cluster.

    Raises Unavailable if no address is given and no cluster runs.
    """
    from tandem.cli.connection.secret_files import one_key
    from tandem.cli.connection.state import newest

    key = one_key("--metrics-key-file", key, key_file)
    if address:
        return address, key
    running = newest()
    return running.metrics, key or running.metrics_key


def checked_prompt(name: str, text: str) -> str:
    """Return `text`. Raises InvalidArgument if it is blank."""
    from tandem.protocol.errors import InvalidArgument

    if not text.strip():
        raise InvalidArgument(name, "is empty; give a question to answer or a text to continue")
    return text
