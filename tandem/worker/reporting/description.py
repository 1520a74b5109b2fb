"""The description of a worker for a controller that did not start it, and the comparison of settings."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from tandem.protocol.messages import Assignment, PeerRef
from tandem.worker.config import WorkerConfig

Settings = tuple[tuple[str, str], ...]
"""Names and values of settings, as text that can be compared."""

_SERVED = (
    *("model", "model_name", "random_weights", "device", "dtype", "page_tokens", "max_model_len", "tokenizer"),
    "adapters",
    *("token", "transfer_backend", "trusted_network", "kv_checksum_rate"),
)
"""The settings that decide which requests a worker can serve and with which workers it is compatible."""
_PASSING = (
    *("worker_id", "role", "engine", "step_policy", "step_budget", "itl_target_s"),
    *("controller_address", "host", "port", "metrics_port", "outlive_s"),
)
"""The settings that are never compared; a new controller sets most of them again."""
_SECRETS = ("token", "metrics_key")


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """The current state of one incarnation of a worker."""

    peer: PeerRef
    assignment: Assignment
    """The last assignment that the worker received."""
    serves: bool
    """True if the worker takes requests; otherwise it starts, drains or has ended."""
    served: Settings
    """The settings that must equal those of a new controller, which otherwise does not take the worker over."""
    tuning: Settings
    """The settings that may differ from the new controller's config; they apply until the worker is restarted."""


def served_of(config: WorkerConfig) -> Settings:
    """Return the settings of `config` that must be equal for a worker to be taken over (`WorkerDescription.served`)."""
    return _settings(config, lambda name: name in _SERVED)


def tuning_of(config: WorkerConfig) -> Settings:
    """Return the settings of `config` that may differ when a worker is taken over (`WorkerDescription.tuning`)."""
    return _settings(config, lambda name: name not in _SERVED and name not in _PASSING)


def differences(ours: Settings, theirs: Settings) -> tuple[str, ...]:
    """Return the names of the settings that differ between `ours` and `theirs` or that only one of them has."""
    our_values, their_values = dict(ours), dict(theirs)
    return tuple(name for name in {**our_values, **their_values} if our_values.get(name) != their_values.get(name))


def _settings(config: WorkerConfig, wanted: Callable[[str], bool]) -> Settings:
    named = [*_values(config.engine), *_values(config)]
    return tuple((name, _told(name, value)) for name, value in named if wanted(name))


def _values(config: Any) -> Iterable[tuple[str, object]]:
    """Return the names and values of a dataclass's fields, its own fields before inherited ones."""
    own = type(config).__annotations__
    ordered = sorted(fields(config), key=lambda field: field.name not in own)
    return ((field.name, getattr(config, field.name)) for field in ordered)


def _told(name: str, value: object) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest() if name in _SECRETS else str(value)
