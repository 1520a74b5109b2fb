"""The model that a benchmark serves, and a running cluster for it with any `ClusterSettings`."""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

from tandem.cli.models.default_model import NAME, find_default_model
from tandem.cli.models.random_model import random_model
from tandem.cluster.launcher import Cluster, Endpoints
from tandem.engine.weights.gguf import prepare_model
from tandem.protocol.errors import InvalidArgument
from tandem.settings.cluster import ClusterSettings
from tandem.settings.setting import fields_by_name

Settings = Mapping[str, object]
"""Fields of `ClusterSettings` by name."""
_BOOLEANS = {"true": True, "false": False}
_SIMPLE = (bool, int, float, str, Path)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model: its folder in Hugging Face layout, its name for clients, and whether its weights are random."""

    folder: Path
    name: str
    random_weights: bool


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add `--model` and `--shape`, the arguments of `choose_model`."""
    parser.add_argument("--model", type=Path, default=None, help="Hugging Face folder or GGUF file")
    parser.add_argument("--shape", default=None, help="random weights of this shape (llama-3-8b) instead of a model")


def choose_model(model: Path | None, shape: str | None) -> ServedModel:
    """Return the model of `shape` with random weights if given, else `model`, else the default model.

    The model's folder is ready to be served.
    """
    if shape is not None:
        return ServedModel(random_model(shape), shape, random_weights=True)
    folder = prepare_model(model or find_default_model())
    return ServedModel(folder, NAME if model is None else folder.name, random_weights=False)


def parse_setting(text: str) -> tuple[str, object]:
    """Parse "max_step_tokens=512" into a setting and its value. Raises InvalidArgument, which says what is wrong."""
    name, _, value = text.partition("=")
    kind = _kinds().get(name)
    if kind is None:
        raise InvalidArgument("--set", f"{name!r} is not one of {', '.join(sorted(_kinds()))}")
    try:
        return name, _BOOLEANS[value.lower()] if kind is bool else kind(value)
    except (KeyError, ValueError):
        raise InvalidArgument("--set", f"{name}={value!r} is no {kind.__name__}") from None


def _kinds() -> dict[str, type]:
    """Return the type of each field that can be set by a text."""
    kinds: dict[str, type] = {}
    for name, (_, field) in fields_by_name(ClusterSettings).items():
        for kind in (field.type, *get_args(field.type)):
            if kind in _SIMPLE or (isinstance(kind, type) and issubclass(kind, StrEnum)):
                kinds[name] = kind
    return kinds


@contextmanager
def running_cluster(model: ServedModel, settings: Settings) -> Iterator[Endpoints]:
    """Run a cluster on free ports until the end of the context. Yields the addresses of its listeners."""
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
