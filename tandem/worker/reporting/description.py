"""The description of a worker for a controller that did not start it, and the comparison of settings."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tandem.protocol.messages import Assignment, PeerRef
from tandem.settings.setting import Settings as Branch
from tandem.worker.config import WorkerConfig

Settings = tuple[tuple[str, str], ...]
"""Names and values of settings, as text that can be compared."""

_SERVED = (
    *("model", "served_model_names", "tokenizer", "random_weights", "device", "dtype", "page_tokens", "max_model_len"),
    *("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
    *("loras", "token", "transfer_backend", "trusted_network", "kv_checksum_rate"),
)
"""The settings that decide which requests a worker can serve and with which workers it is compatible."""
_PASSING = (
    *("worker_id", "role", "step_policy", "step_budget", "itl_target_s"),
    *("controller_address", "host", "port", "outlive_s"),
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
    return tuple((name, _reported(name, value)) for name, value in _values(config) if wanted(name))


def _values(branch: Branch) -> Iterator[tuple[str, object]]:
    """Yield the names and values of all settings: those of the branches in `branch`, then its own."""
    values = branch.values()
    for inner in values.values():
        if isinstance(inner, Branch):
            yield from _values(inner)
    yield from ((name, value) for name, value in values.items() if not isinstance(value, Branch))


def _reported(name: str, value: object) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest() if name in _SECRETS else str(value)
