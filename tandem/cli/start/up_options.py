"""Options of `tandem up` for the cluster around its workers: placement, planner, listeners and service classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from tandem.cli.connection.options import Temperature, checked_prompt

if TYPE_CHECKING:
    from tandem.cli.connection.router import Sampling
    from tandem.cli.start.serving import FirstPrompt
    from tandem.cluster.config import ClusterConfig


class ClusterOptions(Protocol):
    """A group of options that are settings of the cluster."""

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings. InvalidArgument names an option."""


@dataclass(frozen=True, slots=True)
class PlaceOptions:
    """Options of the workers' placement and of timeouts."""

    address: Annotated[
        str,
        typer.Option(
            help="Join a Ray cluster, HOST:PORT or auto, whose nodes offer `prefill` and `decode`; "
            "default: a Ray of its own on this host."
        ),
    ] = ""
    trusted_network: Annotated[
        bool,
        typer.Option(
            "--trusted-network",
            help="Only workers can reach workers over the network: let KV pages cross it, which workers on several "
            "hosts need. UCX then listens at each worker, and every client that connects can write into its memory.",
        ),
    ] = False
    places_timeout: Annotated[
        float, typer.Option(help="Seconds to wait for that Ray cluster and for nodes that offer enough.")
    ] = 0.0
    start_timeout: Annotated[float, typer.Option(help="Seconds that all workers may take to load and serve.")] = 180.0
    stop_grace: Annotated[
        float, typer.Option(help="Seconds that requests in flight may continue when the cluster is stopped.")
    ] = 0.5
    hang_deadline: Annotated[
        float,
        typer.Option(
            help="Seconds without a sign of life after which a process is killed and restarted; 0 = never, for"
            " debuggers that stop it."
        ),
    ] = 30.0
    worker_silence: Annotated[
        float,
        typer.Option(
            help="Seconds without a response after which the router moves a worker's requests to others; 0 = when its"
            " process has ended."
        ),
    ] = 4.0
    recovery_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that requests may wait while the only worker of a role is replaced; 0 = they fail at once."
        ),
    ] = 180.0

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings."""
        return replace(
            config,
            ray_address=self.address,
            trusted_network=self.trusted_network,
            places_timeout_s=self.places_timeout,
            start_timeout_s=self.start_timeout,
            stop_grace_s=self.stop_grace,
            hang_deadline_s=self.hang_deadline,
            worker_silence_s=self.worker_silence,
            recovery_timeout_s=self.recovery_timeout,
        )


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """Options of the planner."""

    planner: Annotated[
        str,
        typer.Option(
            help="on: roles follow the load, and with --planner-workers the number of workers; dry-run: it only says"
            " what it would do; off."
        ),
    ] = "off"
    planner_window: Annotated[float, typer.Option(help="Seconds of the planner's observation window.")] = 15.0
    planner_workers: Annotated[
        str, typer.Option(help="MIN:MAX workers the planner may keep; default: as many as there are.")
    ] = ""
    planner_prefill: Annotated[str, typer.Option(help="MIN:MAX of them that prefill when disaggregated.")] = ""
    planner_decode: Annotated[str, typer.Option(help="MIN:MAX of them that decode when disaggregated.")] = ""

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings. InvalidArgument names an option."""
        from tandem.cluster.planner_config import planner_config

        planner = planner_config(
            self.planner,
            self.planner_window,
            workers=self.planner_workers,
            prefill=self.planner_prefill,
            decode=self.planner_decode,
        )
        return replace(config, planner=planner)


@dataclass(frozen=True, slots=True)
class ListenerOptions:
    """Options of the listeners for clients, operators and metrics, and of their keys."""

    host: Annotated[
        str, typer.Option(help="Address the router listens on; beyond this host it needs API keys, or --insecure.")
    ] = "127.0.0.1"
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Let every client that reaches --host use the cluster without an API key."),
    ] = False
    grpc_port: Annotated[int, typer.Option(help="Port for gRPC clients; 0 = any free one.")] = 50051
    http_port: Annotated[int, typer.Option(help="Port for OpenAI clients; 0 = any free one.")] = 8000
    tls_certificate: Annotated[
        str,
        typer.Option(help="PEM file with the certificate of both ports for clients; read again when it changes."),
    ] = ""
    tls_key: Annotated[str, typer.Option(help="PEM file with its key.")] = ""
    tls_client_ca: Annotated[
        str, typer.Option(help="PEM file with authorities; clients then need a certificate of one of them (mTLS).")
    ] = ""
    operations_port: Annotated[
        int,
        typer.Option(
            help="With TLS: port of the router's probes, metrics and traces over plain HTTP; 0 = any free one."
        ),
    ] = 0
    front_processes: Annotated[
        int, typer.Option(help="Processes that hold clients' connections for the router; 0 = it does so itself.")
    ] = 0
    metrics_port: Annotated[
        int, typer.Option(help="Port of the whole cluster's metrics and of /sd, which lists all processes; 0 = any.")
    ] = 0
    controller_port: Annotated[
        int, typer.Option(help="Port of the controller, for workers and operators; 0 = any free one.")
    ] = 0
    token: Annotated[
        str,
        typer.Option(envvar="TANDEM_CLUSTER_TOKEN", help="The secret of cluster and operators; default: a fresh one."),
    ] = field(default="", repr=False)
    token_file: Annotated[
        str, typer.Option(envvar="TANDEM_CLUSTER_TOKEN_FILE", help="File with that secret, where --token is not given.")
    ] = ""
    metrics_key: Annotated[
        str,
        typer.Option(
            envvar="TANDEM_METRICS_KEY",
            help="Key that opens all metrics; default: none on loopback, but with API keys they are closed.",
        ),
    ] = field(default="", repr=False)
    metrics_key_file: Annotated[
        str,
        typer.Option(envvar="TANDEM_METRICS_KEY_FILE", help="File with that key, where --metrics-key is not given."),
    ] = ""
    otlp_endpoint: Annotated[
        str,
        typer.Option(
            envvar="TANDEM_OTLP_ENDPOINT",
            help="OTLP/gRPC endpoint for request spans, http://HOST:PORT; needs tandem[otlp].",
        ),
    ] = ""
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origins",
            help="Origin of web pages whose scripts may call the HTTP port, e.g. https://chat.example.com, or * for "
            "all (CORS); repeatable; default: none.",
        ),
    ] = None
    tool_call_parser: Annotated[
        str,
        typer.Option(
            help="Form of the model's tool calls: hermes, llama3_json, mistral, deepseek_v3, qwen3_coder, glm45 or"
            " openai; auto: by its chat template; none: tools are rejected unless a call is required."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        typer.Option(
            help="Form of the model's reasoning: qwen3, deepseek_r1 or openai_gptoss; auto: by its chat template; none:"
            " it stays in the content."
        ),
    ] = "auto"
    strict_requests: Annotated[
        bool,
        typer.Option(
            "--strict-requests",
            help="Reject HTTP requests with unknown fields; otherwise such fields are ignored, and the "
            "header X-Tandem-Ignored names them.",
        ),
    ] = False
    log_format: Annotated[str, typer.Option(help="pretty, or json: an object a line.")] = "pretty"
    log_max_mib: Annotated[
        int, typer.Option(help="Size in MiB at which a log file is rotated; the last four are kept.")
    ] = 32

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings. InvalidArgument names an option."""
        from router.text.answer_syntax.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
        from tandem.cli.connection.secret_files import one_key
        from tandem.net.security.server_tls import tls_files

        _check_parser("--tool-call-parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        _check_parser("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS)
        return replace(
            config,
            allowed_origins=tuple(self.allowed_origins or ()),
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            strict_requests=self.strict_requests,
            host=self.host,
            insecure=self.insecure,
            grpc_port=self.grpc_port,
            http_port=self.http_port,
            tls=tls_files(self.tls_certificate, self.tls_key, self.tls_client_ca),
            operations_port=self.operations_port,
            front_processes=self.front_processes,
            metrics_port=self.metrics_port,
            controller_port=self.controller_port,
            token=one_key("--token-file", self.token, self.token_file),
            metrics_key=one_key("--metrics-key-file", self.metrics_key, self.metrics_key_file),
            otlp_endpoint=self.otlp_endpoint,
            log_format=self.log_format,
            log_max_mib=self.log_max_mib,
        )


@dataclass(frozen=True, slots=True)
class OutlivingOptions:
    """Options of workers that outlive `tandem up`; applied last, because they require other settings."""

    workers_outlive: Annotated[
        float,
        typer.Option(
            help="With --address: seconds that workers wait for another `tandem up` of the same --cluster-name and "
            "--token to take them over when this one is gone, or was stopped by SIGTERM; 0 = they end with it."
        ),
    ] = 0.0
    cluster_name: Annotated[str, typer.Option(help="The name that identifies those workers.")] = "tandem"

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings. InvalidArgument names an option."""
        return replace(config, workers_outlive_s=self.workers_outlive, cluster_name=self.cluster_name)


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Options of the service classes and the API keys."""

    slo_class: Annotated[
        list[str] | None,
        typer.Option(
            "--slo-class",
            help="NAME:TTFT_MS:ITL_MS[:PERCENT[:WORST_GAP_MS]][:reject|degrade]: targets that requests may ask for by "
            "name, in addition to or instead of strict, balanced, quick and best_effort, and the action when they "
            "cannot be met; repeatable.",
        ),
    ] = None
    default_slo_class: Annotated[str, typer.Option(help="The class of requests that name none.")] = "best_effort"
    default_max_tokens: Annotated[
        int | None, typer.Option(help="Maximum output tokens of requests that set no limit; default: the context's.")
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", envvar="TANDEM_API_KEY", help="Key that clients must present; repeatable."),
    ] = None
    api_key_file: Annotated[
        str,
        typer.Option(
            envvar="TANDEM_API_KEY_FILE",
            help="File with more of them, read again when it changes. A line has KEY or sha256:HEX, then name=NAME, "
            "role=tenant, operator or reader, requests_per_minute=N and tokens_per_minute=N where wanted; from # on it "
            "is a comment.",
        ),
    ] = ""
    audit_log: Annotated[
        str,
        typer.Option(help="File for a line of JSON about each call of a client: who, what, when, and how many tokens."),
    ] = ""

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings. InvalidArgument names an option."""
        from pathlib import Path

        from router.slo_options import parse_class, with_defaults
        from tandem.cli.connection.secret_files import checked_key_file

        return replace(
            config,
            slo_classes=with_defaults(parse_class(each) for each in self.slo_class or ()),
            default_slo_class=self.default_slo_class,
            default_max_tokens=self.default_max_tokens,
            api_keys=tuple(dict.fromkeys(self.api_key or ())),
            api_key_file=checked_key_file("--api-key-file", self.api_key_file),
            audit_log=Path(self.audit_log).absolute() if self.audit_log else None,
        )


@dataclass(frozen=True, slots=True)
class FirstPromptOptions:
    """Options of a first prompt."""

    prompt: Annotated[str | None, typer.Option("--prompt", help="Answer this first and show its timeline.")] = None
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Maximum tokens of that answer.")] = 160
    temperature: Temperature = 0.0
    once: Annotated[bool, typer.Option("--once", help="End after that answer.")] = False

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters; InvalidArgument names the option and its limits."""
        from tandem.cli.connection.router import Sampling

        return Sampling(self.max_tokens, self.temperature)

    def first(self, sampling: Sampling) -> FirstPrompt | None:
        """Returns the first prompt, if any. InvalidArgument for --once without a prompt."""
        from tandem.cli.start.serving import FirstPrompt
        from tandem.protocol.errors import InvalidArgument

        if self.prompt is not None:
            return FirstPrompt(checked_prompt("--prompt", self.prompt), sampling)
        if self.once:
            raise InvalidArgument("--once", "needs a --prompt to answer")
        return None


def _check_parser(option: str, name: str, names: Sequence[str]) -> None:
    """Raises InvalidArgument for an unknown parser before anything starts; the router would only say it later."""
    from tandem.protocol.errors import InvalidArgument

    if name not in ("auto", "none", *names):
        raise InvalidArgument(option, f"{name!r} is none of auto, none, {', '.join(names)}")
