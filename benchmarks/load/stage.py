"""Starts a cluster for a benchmark, with any field of `ClusterConfig`."""

import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.load.served_model import ServedModel
from tandem.cluster.config import ClusterConfig
from tandem.cluster.launcher import Cluster, Endpoints
from tandem.protocol.errors import InvalidArgument

Settings = Mapping[str, object]
"""Fields of `ClusterConfig` by name."""
_BOOLEANS = {"true": True, "false": False}
_SIMPLE = (bool, int, float, str, Path)


def parse_setting(text: str) -> tuple[str, object]:
    """Parses "max_step_tokens=512" into a field of `ClusterConfig` and its value. InvalidArgument describes errors."""
    name, _, value = text.partition("=")
    kind = _kinds().get(name)
    if kind is None:
        raise InvalidArgument("--set", f"{name!r} is none of {', '.join(sorted(_kinds()))}")
    try:
        return name, _BOOLEANS[value.lower()] if kind is bool else kind(value)
    except (KeyError, ValueError):
        raise InvalidArgument("--set", f"{name}={value!r} is no {kind.__name__}") from None


def _kinds() -> dict[str, type]:
    """Returns the type of each field that a text can set."""
    kinds: dict[str, type] = {}
    for name, hint in typing.get_type_hints(ClusterConfig).items():
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        for option in options:
            if option in _SIMPLE:
                kinds[name] = option
    return kinds


@contextmanager
def running_cluster(model: ServedModel, settings: Settings) -> Iterator[Endpoints]:
    """Runs a cluster on free ports until the end of the context; yields its listeners."""
    served = {"model_name": model.name, "random_weights": model.random_weights, "grpc_port": 0, "http_port": 0}
    config = ClusterConfig(model.folder, **(served | dict(settings)))  # type: ignore[arg-type]  # checked by its fields
    cluster = Cluster.start(config)
    try:
        yield cluster.endpoints
    finally:
        cluster.stop()
