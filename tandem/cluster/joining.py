"""The Ray cluster that is joined, and the name under which workers that outlive their start are found there."""

import re

from tandem.protocol.errors import InvalidArgument

DEFAULT_NAME = "tandem"


def check_ray_address(address: str) -> None:
    """Checks a Ray address; raises InvalidArgument unless it is `auto` or host:port."""
    if re.fullmatch(r"auto|[^\s/]+:[0-9]+", address) is None:
        raise InvalidArgument("--address", f"{address!r} is neither auto nor HOST:PORT of a Ray cluster")


def check_cluster_name(name: str) -> None:
    """Checks a cluster name; raises InvalidArgument unless it can be part of a Ray namespace."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name) is None:
        raise InvalidArgument("--cluster-name", f"{name!r} is not made of letters, digits and . _ -")


def namespace_of(name: str) -> str:
    """Returns the Ray namespace in which workers and controllers of the cluster of this name are found."""
    return f"tandem-{name}"
