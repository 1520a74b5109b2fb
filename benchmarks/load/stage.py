"""Starts a cluster for a benchmark, with any field of `ClusterSettings`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

from benchmarks.load.served_model import ServedModel
from tandem.cluster.launcher import Cluster, Endpoints
from tandem.protocol.errors import InvalidArgument
from tandem.settings.cluster import ClusterSettings
from tandem.settings.tree import fields_by_name

Settings = Mapping[str, object]
"""Fields of `ClusterSettings` by name."""
_BOOLEANS = {"true": True, "false": False}
_SIMPLE = (bool, int, float, str, Path)


def parse_setting(text: str) -> tuple[str, object]:
    """Parses "max_step_tokens=512" into a setting and its value. InvalidArgument describes errors."""
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
    for name, (_, field) in fields_by_name(ClusterSettings).items():
        for kind in (field.type, *get_args(field.type)):
            if kind in _SIMPLE or (isinstance(kind, type) and issubclass(kind, StrEnum)):
                kinds[name] = kind
    return kinds


@contextmanager
def running_cluster(model: ServedModel, settings: Settings) -> Iterator[Endpoints]:
    """Runs a cluster on free ports until the end of the context; yields its listeners."""
    served: dict[str, Any] = {
        "served_model_names": (model.name,),
        "random_weights": model.random_weights,
        "grpc_port": 0,
        "http_port": 0,
    }
    config = ClusterSettings.of(model.folder, **(served | dict(settings)))
    cluster = Cluster.start(config)
    try:
        yield cluster.endpoints
    finally:
        cluster.stop()
