"""The walls of a model by phase: its arithmetic intensity against the ridge of each GPU, memory, and the network.

The roofline (Williams, Waterman and Patterson, CACM 2009): work of fewer operations per byte than the ridge, peak
operations ÷ peak bytes, is bound by memory bandwidth, work of more by compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.capacity.plan.worker_kind import WorkerKind
from tandem.capacity.planner.demand import Demand
from tandem.capacity.simulation.hardware import ITEM_BYTES, kv_bytes_per_held_token
from tandem.cost_model.devices import DeviceKind
from tandem.cost_model.step_work import StepWork, chunk_pairs
from tandem.engine.model_sizes import model_sizes
from tandem.metrics.bottlenecks import Bottleneck

BATCHES = (1, 8, 32, 128, 256)
"""The batch sizes of decode steps for which intensity and KV are computed."""
CONTEXTS = (2048, 8192, 32768, 131072)
"""The tokens of a request for which the KV of a batch is computed."""


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """The operations and bytes of a step that only computes a prompt or only decodes."""

    name: str
    flops: float
    bytes_read: float

    @property
    def intensity(self) -> float:
        """The arithmetic intensity, in operations per byte."""
        return self.flops / self.bytes_read

    def wall(self, device: DeviceKind) -> Bottleneck:
        """Return the resource that limits the step on a device."""
        return Bottleneck.COMPUTE if self.intensity > ridge(device) else Bottleneck.BANDWIDTH


def ridge(device: DeviceKind) -> float:
    """Return the intensity, in operations per byte, at which a device's arithmetic takes as long as its reads."""
    return device.ceilings.flops / device.ceilings.bytes_per_s


def phases(kind: WorkerKind, demand: Demand) -> Iterator[PhaseWork]:
    """Yield the work of a prompt of mean length, and of a decode step of each of `BATCHES` requests."""
    sizes, tokens = model_sizes(kind.model, ITEM_BYTES, kind.kv_element_bytes), int(demand.computed_tokens)
    prompt = StepWork(tokens, chunk_pairs(tokens, int(demand.prompt_tokens) - tokens))
    decode = [StepWork(decode_rows=rows, decode_context_tokens=rows * round(demand.context_tokens)) for rows in BATCHES]
    for name, work in zip(("prompt", *(f"decode {rows}" for rows in BATCHES)), (prompt, *decode), strict=True):
        yield PhaseWork(name, sizes.step_flops(work), sizes.step_bytes(work))


def kv_gib(kind: WorkerKind, batch: int, tokens: int) -> float:
    """Return the GiB of KV of `batch` requests of `tokens` tokens each, on all GPUs of a worker."""
    return batch * tokens * kv_bytes_per_held_token(kind.model, tokens, kind.kv_element_bytes) / 2**30


def transfer_seconds(kind: WorkerKind, tokens: float, bytes_per_s: float) -> float:
    """Return the seconds to write the KV of a prompt of `tokens` tokens at `bytes_per_s`."""
    return tokens * kv_bytes_per_held_token(kind.model, tokens, kind.kv_element_bytes) / bytes_per_s
