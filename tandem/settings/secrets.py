"""The secrets of a cluster, of which each process gets those that it needs."""

from dataclasses import dataclass

from tandem.settings.parsing import check_key
from tandem.settings.setting import Settings, Topic, setting


def _check_secret(name: str, secret: str) -> None:
    if secret:
        check_key(name, secret)


@dataclass(frozen=True, slots=True)
class Secrets(Settings):
    """The secret of the cluster's processes and operators, and the key for metrics."""

    token: str = setting(
        "",
        help="The secret of cluster and operators; default: a fresh one.",
        topic=Topic.ACCESS,
        variable="TANDEM_CLUSTER_TOKEN",
        secret=True,
        check=_check_secret,
    )
    """All listeners except the router's require this secret."""
    metrics_key: str = setting(
        "",
        help="Key that opens all metrics; default: none on loopback, but with API keys they are closed.",
        topic=Topic.ACCESS,
        secret=True,
        check=_check_secret,
    )
    """If it is empty, metrics that are not public require a key that is derived from `token`."""
