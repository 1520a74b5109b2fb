"""Which GPUs hold a model, for each width of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tandem.capacity.plan.worker_kind import GROUP_SIZES, WorkerKind
from tandem.capacity.planner.demand import Demand
from tandem.capacity.simulation.hardware import ITEM_BYTES
from tandem.cost_model.devices import DEVICES
from tandem.engine.config.model import ModelSpec
from tandem.engine.model_sizes import matrix_bytes


@dataclass(frozen=True, slots=True)
class Fit:
    """The smallest worker, of one kind of GPU, that holds a model and the KV of a request."""

    gpu: str
    gpus: int | None
    """The fewest GPUs of such a worker; None = 8 are too few, or the model cannot be divided among as many."""
    kv_tokens: int = 0
    """Number of tokens that the KV pages of the worker hold."""


@dataclass(frozen=True, slots=True)
class Width:
    """A model with weights of one width, and the GPUs that hold it."""

    quantization: str
    """The value of `--quantization` that gives this width; empty = the weights as they are stored."""
    model: ModelSpec
    fits: tuple[Fit, ...]

    @property
    def weight_bytes(self) -> int:
        """The bytes of all matrices on GPUs."""
        return matrix_bytes(self.model, ITEM_BYTES)


def what_fits(name: str, model: ModelSpec, tokens: int) -> Iterator[Width]:
    """Yield the model as stored and, if it is not quantized, with 8-bit and 4-bit weights.

    `tokens` are those of the longest request, prompt and answer.
    """
    request = Demand(1.0, tokens, 0.0)
    stored = WorkerKind(name, model, next(iter(DEVICES.values())), group_sizes=GROUP_SIZES)
    for quantization, narrower in stored.weight_forms():
        workers = (replace(stored, model=narrower, device=device) for device in DEVICES.values())
        fits = (_smallest(gpu, worker, request) for gpu, worker in zip(DEVICES, workers, strict=True))
        yield Width(quantization, narrower, tuple(fits))


def _smallest(gpu: str, worker: WorkerKind, request: Demand) -> Fit:
    for kind in worker.groups():
        if kind.fits(request):
            return Fit(gpu, kind.gpus, int(kind.memory(request).kv_tokens))
    return Fit(gpu, None)
