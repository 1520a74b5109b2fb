"""What a worker says of itself to a controller that did not start it, and how that one tells whether it fits."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from wire.messages import Assignment, PeerRef
from worker.config import WorkerConfig

Settings = tuple[tuple[str, str], ...]
"""Names of settings, and what they are, in words that can be compared."""

_SERVED = (
    *("model", "model_name", "random_weights", "device", "dtype", "page_tokens"),
    *("token", "transfer_backend", "trusted_network", "kv_checksum_rate"),
)
"""What a worker serves and with whom it can work."""
_PASSING = (
    *("worker_id", "role", "engine", "step_policy", "step_budget", "itl_target_s"),
    *("controller_address", "host", "port", "metrics_port", "outlive_s"),
)
"""What another controller tells anew, or nobody does."""
_SECRETS = ("token", "metrics_key")


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """One run of a worker as it is now."""

    peer: PeerRef
    assignment: Assignment
    """What it was told to do last."""
    serves: bool
    """Whether it takes requests; else it starts, drains or has ended."""
    served: Settings
    """What it serves: with others it cannot be taken over."""
    tuning: Settings
    """How it does so: with others it can, until it is started again."""


def served_of(config: WorkerConfig) -> Settings:
    """What a worker of `config` serves."""
    return _settings(config, lambda name: name in _SERVED)


def tuning_of(config: WorkerConfig) -> Settings:
    """How a worker of `config` does that."""
    return _settings(config, lambda name: name not in _SERVED and name not in _PASSING)


def differences(ours: Settings, theirs: Settings) -> tuple[str, ...]:
    """The names of settings that are not the same; a setting that only one side knows is one of them."""
    mine, others = dict(ours), dict(theirs)
    return tuple(name for name in {**mine, **others} if mine.get(name) != others.get(name))


def _settings(config: WorkerConfig, wanted: Callable[[str], bool]) -> Settings:
    named = [*_values(config.engine), *_values(config)]
    return tuple((name, _told(name, value)) for name, value in named if wanted(name))


def _values(config: Any) -> Iterable[tuple[str, object]]:
    return ((each.name, getattr(config, each.name)) for each in fields(config))


def _told(name: str, value: object) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest() if name in _SECRETS else str(value)
