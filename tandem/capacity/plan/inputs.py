"""The input of `tandem plan`, and the parts of its output that need no simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.capacity.plan.memory import NO_DRAFT_MEMORY, OVERHEAD_BYTES, DraftMemory, Memory
from tandem.capacity.plan.speculation import Drafting
from tandem.capacity.plan.what_if import Quantized
from tandem.capacity.planner.decision import Split
from tandem.capacity.planner.demand import Demand, LatencyTargets
from tandem.capacity.planner.load_ratio import WorkerFacts
from tandem.capacity.planner.policy import TARGET_RATIO
from tandem.capacity.planner.sizing import Sizing
from tandem.capacity.simulation.hardware import (
    ITEM_BYTES,
    Hardware,
    kv_bytes_per_held_token,
    kv_element_bytes,
    kv_page_bytes,
    roofline,
)
from tandem.cost_model.devices import DEVICES, DeviceKind
from tandem.cost_model.step_cost import StepCost
from tandem.engine.config import EngineConfig
from tandem.engine.config.model import ModelSpec
from tandem.engine.config.quantization import Codes
from tandem.engine.memory import GIB
from tandem.engine.model_sizes import matrix_bytes
from tandem.engine.models.load_spec import quantized_at_load
from tandem.protocol.cost_parameters import CostParameters
from tandem.protocol.errors import InvalidArgument
from tandem.settings.engine import GPU_BATCH_REQUESTS
from tandem.settings.planner import Limits, Range

WORKER = EngineConfig.of(Path("model"))
"""The default worker settings, which all planned workers have."""
WORKERS_MAX = 1024
_HELPS = "more workers do not help: relax the target, or take a faster --gpu or a smaller model"


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The input of `tandem plan`: a model, the GPU of each worker, the load to serve and its latency targets."""

    name: str
    model: ModelSpec
    device: DeviceKind
    demand: Demand
    targets: LatencyTargets
    workers: int | None = None
    """Number of workers; None = the smallest number that leaves headroom."""
    cost: CostParameters | None = None
    """Fitted step costs; None = those of the device's roofline."""
    kv_element_bytes: float = ITEM_BYTES
    """Bytes of one KV element, including its share of a quantization scale."""
    draft: DraftMemory = NO_DRAFT_MEMORY
    """The memory of the draft model or of the draft heads."""
    drafting: Drafting | None = None
    """Speculative decoding in the simulated workers; None = without it."""

    @property
    def costs(self) -> CostParameters:
        """The step costs: the fitted ones or, without any, those of the roofline."""
        return self.cost or self.predicted_costs

    @property
    def predicted_costs(self) -> CostParameters:
        """The step costs from the device's roofline."""
        return roofline(self.model, self.device.ceilings, self.kv_element_bytes)

    @property
    def draft_step_ratio(self) -> float:
        """The duration of a one-request decode step of the draft model ÷ that of the main model, by the roofline.

        It is 0 without a draft model.
        """
        if self.draft.model is None:
            return 0.0
        context = round(self.demand.context_tokens)
        costs = roofline(self.draft.model, self.device.ceilings), self.predicted_costs
        drafted_s, step_s = (StepCost(parameters).decode_step_seconds(1, context) for parameters in costs)
        return drafted_s / step_s

    @property
    def memory(self) -> Memory:
        """The memory of one worker."""
        return self._memory(self.model, self.kv_element_bytes)

    def _memory(self, model: ModelSpec, kv_element_bytes: float) -> Memory:
        a_token = kv_bytes_per_held_token(model, self.demand.kv_tokens, kv_element_bytes)
        device_bytes = self.device.memory_gib * GIB * WORKER.gpu_memory_fraction
        weights, draft = matrix_bytes(model, ITEM_BYTES), self.draft
        return Memory(device_bytes, weights, a_token, draft.weight_bytes, draft.kv_bytes_per_token(self.demand))

    def quantized_forms(self) -> Iterator[Quantized]:
        """Yield the model with 8-bit weights, with 8-bit KV and with both, with their step costs by the roofline.

        Weights and KV that are already quantized are left out.
        """
        packed = None if self.model.quantization else quantized_at_load(self.model, Codes.INT8)
        kv = self._narrower_kv()
        for name, model, element_bytes in (
            ("weights in 8 bits", packed, self.kv_element_bytes),
            ("KV in 8 bits", self.model, kv),
            ("both", packed, kv),
        ):
            if model is not None and element_bytes is not None:
                after = roofline(model, self.device.ceilings, element_bytes)
                yield Quantized(name, self._memory(model, element_bytes), self.predicted_costs, after)

    def _narrower_kv(self) -> float | None:
        """Return the bytes of an 8-bit KV element.

        Returns None if the KV is already that narrow, or if 8-bit KV is unsupported.
        """
        try:
            element_bytes = kv_element_bytes(self.model, "int8")
        except InvalidArgument:
            return None
        return element_bytes if element_bytes < self.kv_element_bytes else None

    @property
    def facts(self) -> WorkerFacts:
        """The costs and capacity of one worker."""
        kv_tokens, longest = self.memory.kv_tokens, self.model.max_context
        return WorkerFacts(self.costs, kv_tokens, GPU_BATCH_REQUESTS, WORKER.max_step_tokens, longest)

    @property
    def sizing(self) -> Sizing:
        """The demand, and the workers' costs and capacity, from which their number and split are computed."""
        return Sizing(self.demand, self.targets, self.facts, self.facts)

    @property
    def hardware(self) -> Hardware:
        """The hardware of a simulated worker."""
        pages = int(self.memory.kv_bytes / kv_page_bytes(self.model, self.kv_element_bytes))
        fitted, drafts = replace(self.costs, observed=1000), None
        if self.drafting is not None:
            drafts = self.drafting.simulated(StepCost(fitted), round(self.demand.context_tokens))
        return Hardware(
            self.model, self.name, fitted, fitted, pages, kv_element_bytes=self.kv_element_bytes, drafts=drafts
        )

    def _fits(self, memory: Memory) -> bool:
        return memory.kv_tokens >= self.demand.kv_tokens

    def _what_fits(self) -> str:
        """Return the end of an error message: a quantization and a GPU with which a mean request fits, if they exist.

        It also says how many GPUs of the current kind the request would take, if they have memory beyond
        `OVERHEAD_BYTES`.
        """
        kv = self._narrower_kv()
        fitting = [
            " ".join([f"--quantization {codes}"] * (model is not self.model) + ["--kv-cache-dtype int8"] * narrow)
            for codes, model in self._weight_forms()
            for narrow in ([False, True] if kv else [False])
            if self._fits(self._memory(model, kv if kv and narrow else self.kv_element_bytes))
        ]
        larger = [name for name, kind in DEVICES.items() if self._fits(replace(self, device=kind).memory)]
        larger.sort(key=lambda name: DEVICES[name].memory_gib)
        choices = [*fitting[:1], *(f"--gpu {name}" for name in larger[:1])]
        words = (
            f"it fits with {' or '.join(choices)}" if choices else "it fits in fewer bits neither, and on no known GPU"
        )
        memory = self.memory
        if memory.device_bytes <= OVERHEAD_BYTES:
            return words
        fixed = memory.weight_bytes + memory.draft_weight_bytes
        a_token = memory.kv_bytes_per_token + memory.draft_kv_bytes_per_token
        gpus = math.ceil((fixed + self.demand.kv_tokens * a_token) / (memory.device_bytes - OVERHEAD_BYTES))
        return f"{words}; as it is, it takes {gpus} of these GPUs, and a worker has one"

    def _weight_forms(self) -> Iterator[tuple[str, ModelSpec]]:
        """Yield the model as it is and, if it is not quantized, with 8-bit and with 4-bit weights.

        Each is preceded by the value of `--quantization` that gives it, "" for the model as it is.
        """
        yield "", self.model
        if self.model.quantization is None:
            for codes in (Codes.INT8, Codes.INT4):
                yield codes.value, quantized_at_load(self.model, codes)

    def check(self) -> None:
        """Check the input. Raises InvalidArgument if no number of workers can serve the load within its targets."""
        demand, memory = self.demand, self.memory
        if not self._fits(memory):
            weights = (memory.weight_bytes + memory.draft_weight_bytes) / GIB
            missing = f"{memory.kv_tokens:.0f} tokens of KV fit beside {weights:.0f} GiB of weights"
            raise InvalidArgument("--gpu", f"{missing}, and a request has {demand.kv_tokens:.0f}; {self._what_fits()}")
        if demand.kv_tokens > self.model.max_context:
            message = (
                f"prompt and answer have {demand.kv_tokens:.0f} tokens, {self.name} takes {self.model.max_context}"
            )
            raise InvalidArgument("--prompt-tokens", message)
        cost, targets = StepCost(self.costs), self.targets
        step_s = cost.decode_step_seconds(1, round(demand.context_tokens))
        if step_s > targets.gap_s:
            message = f"a single request has {step_s * 1e3:.1f} ms between its tokens"
            raise InvalidArgument("--slo-itl", f"{message}; {_HELPS}")
        alone_s = demand.lone_prompt_seconds(cost, WORKER.max_step_tokens)
        if alone_s > targets.ttft_s:
            message = f"a prompt of {demand.computed_tokens:.0f} tokens alone takes {alone_s * 1e3:.0f} ms to compute"
            raise InvalidArgument("--slo-ttft", f"{message}; {_HELPS}")

    def split(self) -> Split:
        """Return the best split of the given number of workers or, without a number, the smallest split with headroom.

        A single worker does both prefill and decode.
        """
        if self.workers is not None:
            best = self.sizing.best(self.workers, Limits(), shared=self.workers == 1)
        else:
            best = self.sizing.fewest(Range(2, WORKERS_MAX), Limits(), TARGET_RATIO)
        assert best is not None
        return best
