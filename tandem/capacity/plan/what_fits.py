"""Which GPUs hold a model and a request, for each width of the model's weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tandem.capacity.plan.memory import Memory
from tandem.capacity.plan.worker_kind import GROUP_SIZES, WorkerKind, usable_bytes
from tandem.capacity.planner.demand import Demand
from tandem.cost_model.devices import DEVICES
from tandem.engine.config.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Fit:
    """The smallest worker, of one kind of GPU, that holds a model and the KV of a request."""

    gpus: int
    kv_tokens: float
    """Number of tokens that the KV pages of the worker hold."""


@dataclass(frozen=True, slots=True)
class Width:
    """A model with weights of one width, and the GPUs that hold it."""

    quantization: str
    """The value of `--quantization` that gives this width; empty = the weights as they are stored."""
    weight_bytes: float
    """The bytes of all weights on one GPU."""
    fits: Mapping[str, Fit | None]
    """The smallest worker for each known GPU; None = the model and a request do not fit on 8 of them."""


def what_fits(name: str, model: ModelSpec, demand: Demand) -> Iterator[Width]:
    """Yield the model as stored and, if it is not quantized, with 8-bit and with 4-bit weights.

    The worker has 1, 2, 4 or 8 GPUs, among which the model is divided, and must hold a mean request of `demand`.
    """
    stored = WorkerKind(name, model, next(iter(DEVICES.values())))
    for quantization, narrower in stored.weight_forms():
        groups = replace(stored, model=narrower, group_sizes=GROUP_SIZES).groups()
        memories = list(_until_it_fits(groups, demand))
        fits = {gpu: _smallest(memories, usable_bytes(device), demand) for gpu, device in DEVICES.items()}
        yield Width(quantization, memories[0][1].weight_bytes, fits)


def _until_it_fits(groups: Iterable[WorkerKind], demand: Demand) -> Iterator[tuple[int, Memory]]:
    """Yield the number of GPUs of each group and the memory of each GPU, until a request fits on the smallest GPU."""
    smallest = min(map(usable_bytes, DEVICES.values()))
    for group in groups:
        memory = group.memory(demand)
        yield group.gpus, memory
        if replace(memory, device_bytes=smallest).fits(demand):
            return


def _smallest(memories: Iterable[tuple[int, Memory]], device_bytes: float, demand: Demand) -> Fit | None:
    """Return the worker with the fewest GPUs of `device_bytes` on which a mean request fits; None if there is none.

    `memories` has the memory of each GPU by the number of GPUs, ascending.
    """
    for gpus, memory in memories:
        on_device = replace(memory, device_bytes=device_bytes)
        if on_device.fits(demand):
            return Fit(gpus, on_device.kv_tokens)
    return None
