"""The configuration with which one router starts."""

from dataclasses import dataclass
from pathlib import Path

from tandem.net.address import is_loopback
from tandem.net.security.api_keys import KeySource, read_keys
from tandem.net.security.credentials import check_guarded, reading_keys
from tandem.protocol.mode import Mode
from tandem.settings.router import RouterSettings


@dataclass(frozen=True, slots=True)
class RouterConfig(RouterSettings):
    """The settings of one router, and the values that the controller adds. An immutable value.

    The controller adds the model, the router's identity, its own address, and the secrets.
    """

    router_id: str
    """The router's unique id in the cluster, by which workers know it."""
    model: Path
    """The model folder, with tokenizer.json, tokenizer_config.json, config.json and generation_config.json."""
    model_name: str
    """The model's name in requests and answers."""
    controller_address: str
    """host:port of the controller's gRPC server."""
    token: str = ""
    """The cluster's secret, used for mutual TLS between components; "" = no authentication and no encryption."""
    name: str = "router"
    """The router's name in metrics, which stays the same after a restart."""
    model_aliases: tuple[str, ...] = ()
    """Further names of the model that requests may use."""
    tokenizer: Path | None = None
    """The folder with the tokenizer, its configuration and chat templates; None = `model`."""
    mode: Mode = Mode.ADAPTIVE
    """The placement mode: prefill on prefill workers, on the decode worker, or where the predicted cost is lowest."""
    metrics_key: str = ""
    """The key for `/metrics`.

    "" = a key derived from `token` if API keys are required or `host` is not loopback, else no key.
    """

    def __post_init__(self) -> None:
        """Validate the settings. Raises InvalidArgument with the name of an invalid setting."""
        self.check()
        check_guarded("host", self.host, guarded=self.guarded, insecure=self.insecure)

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer: `tokenizer` if it is set, else `model`."""
        return self.tokenizer or self.model

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names of the model; the first is the one in answers."""
        return self.model_name, *self.model_aliases

    @property
    def key_source(self) -> KeySource:
        """The source of all API keys and metrics keys that the router accepts."""
        loopback = is_loopback(self.host)
        readers = reading_keys(self.metrics_key, self.token, guarded=self.guarded, loopback=loopback)
        return KeySource(self.api_keys, self.api_key_file, readers)

    @property
    def tenant_queue_limit(self) -> int:
        """Maximum number of waiting requests of one tenant: `max_queued_per_tenant` if it is set, else a default.

        The default is half of the queue if there are several API keys, else the whole queue.
        """
        if self.max_queued_per_tenant is not None:
            return self.max_queued_per_tenant
        in_file = read_keys("api_key_file", self.api_key_file) if self.api_key_file else ()
        several = len(self.api_keys) + len(in_file) > 1
        return max(1, self.max_queued_requests // 2) if several else self.max_queued_requests
