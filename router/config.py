"""The configuration with which one router starts."""

from dataclasses import dataclass, field

from tandem.net.address import is_loopback
from tandem.net.security.api_keys import KeySource, read_keys
from tandem.net.security.credentials import check_guarded, reading_keys
from tandem.settings.model import ModelSettings
from tandem.settings.router import CPU_CHUNKS_PER_S, GPU_CHUNKS_PER_S, RouterSettings
from tandem.settings.secrets import Secrets


@dataclass(frozen=True, slots=True)
class RouterConfig(RouterSettings):
    """A router's settings, the served model, secrets, and the router's identity and addresses. An immutable value.

    The controller adds all but the settings. Every part of the router reads it.
    """

    router_id: str
    """The router's unique id in the cluster, by which workers know it."""
    served: ModelSettings
    controller_address: str
    """host:port of the controller's gRPC server."""
    secrets: Secrets = field(default_factory=Secrets)
    """The cluster's secrets; without a token, there is no authentication and no encryption."""
    name: str = "router"
    """The router's name in metrics, which stays the same after a restart."""
    prefix_cache: bool = True
    """True if the workers have prefix caches."""
    engines_on_cpu: bool = False
    """True if the workers' engines compute on the CPU."""

    def __post_init__(self) -> None:
        """Validate the settings. Raises InvalidArgument with the name of an invalid setting."""
        self.check()
        check_guarded("host", self.host, guarded=self.guarded, insecure=self.insecure)

    @property
    def chunk_rate(self) -> float:
        """The effective `chunks_per_s`: the setting, or the default of the engines' device."""
        default = CPU_CHUNKS_PER_S if self.engines_on_cpu else GPU_CHUNKS_PER_S
        return default if self.chunks_per_s is None else self.chunks_per_s

    @property
    def key_source(self) -> KeySource:
        """The source of all API keys and metrics keys that the router accepts."""
        loopback = is_loopback(self.host)
        readers = reading_keys(self.secrets.metrics_key, self.secrets.token, guarded=self.guarded, loopback=loopback)
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
