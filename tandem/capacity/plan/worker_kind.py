"""Workers of one kind: the model and the GPUs of each worker, and the costs and capacity that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tandem.capacity.plan.memory import NO_DRAFT_MEMORY, DraftMemory, Memory
from tandem.capacity.plan.speculation import Drafting
from tandem.capacity.plan.what_if import Quantized
from tandem.capacity.planner.demand import Demand, LatencyTargets
from tandem.capacity.planner.load_ratio import WorkerFacts
from tandem.capacity.simulation.hardware import (
    ITEM_BYTES,
    Hardware,
    expert_parallel_roofline,
    kv_bytes_per_held_token,
    kv_element_bytes,
    kv_page_bytes,
    paged,
    roofline,
)
from tandem.cost_model.devices import DEVICES, DeviceKind
from tandem.cost_model.step_cost import StepCost
from tandem.engine.config import EngineConfig
from tandem.engine.config.model import ModelSpec
from tandem.engine.config.quantization import Codes
from tandem.engine.config.sharding import Rank, check_token_division, local_experts_spec, own_spec
from tandem.engine.memory import GIB
from tandem.engine.model_sizes import matrix_bytes
from tandem.engine.models.load_spec import quantized_at_load
from tandem.engine.models.rank_parameters import rank_bytes
from tandem.protocol.cost_parameters import CostParameters
from tandem.protocol.errors import InvalidArgument
from tandem.settings.engine import GPU_BATCH_REQUESTS

SETTINGS = EngineConfig.of(Path("model"))
"""The default engine settings, which all planned workers have."""
GROUP_SIZES = (1, 2, 4, 8)
"""The numbers of GPUs of a worker that are compared if none is given: up to those of a common host."""
STAGES = 2
"""The number of pipeline stages of prefill workers that is compared with one: more than two do not compute at once."""
STAGED_THROUGHPUT = 1.85
"""Throughput of long prompts in several stages ÷ that in one stage of as many GPUs as each of them has.

Measured on two H200 (docs/decisions/tensor_parallelism.md).
"""
_HELPS = "more workers do not help: relax the target, or take a faster --gpu or a smaller model"


def usable_bytes(device: DeviceKind) -> float:
    """Return the memory of a GPU that a worker may use, in bytes."""
    return device.memory_gib * GIB * SETTINGS.gpu_memory_fraction


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Workers of one kind: each has a model that is divided among `gpus` GPUs.

    With `expert_parallel`, these are the GPUs of several hosts: each holds a part of the experts, all other weights and
    the KV of its own requests. Otherwise they are ranks of one host: in pipeline stages of equally many ranks (tensor
    parallelism), or with the whole model each, dividing the tokens of prompts (context parallelism).
    """

    name: str
    model: ModelSpec
    device: DeviceKind
    gpus: int = 1
    stages: int = 1
    """Number of pipeline stages among which the layers are divided; decode workers have 1."""
    context_ranks: int = 1
    """Number of ranks among which the tokens of prompts are divided; decode workers have 1."""
    group_sizes: tuple[int, ...] = ()
    """The numbers of GPUs among which `PlanInputs.with_fewest_gpus` chooses; empty = `gpus` is given."""
    cost: CostParameters | None = None
    """Fitted step costs; None = those of the device's roofline."""
    expert_parallel: bool = False
    two_batch_overlap: bool = False
    """True if expert-parallel GPUs compute one half of each step while the other half is exchanged."""
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
        return self._roofline(self.model, self.kv_element_bytes)

    def _roofline(self, model: ModelSpec, kv_element_bytes: float) -> CostParameters:
        ceilings = self.device.ceilings
        if not self.expert_parallel:
            return roofline(model, ceilings, kv_element_bytes, self.tensor_ranks, context_ranks=self.context_ranks)
        return expert_parallel_roofline(
            model, ceilings, kv_element_bytes, self.gpus, two_batch_overlap=self.two_batch_overlap
        )

    @property
    def tensor_ranks(self) -> int:
        """The number of ranks among which the layers of each pipeline stage are divided."""
        return self.gpus // (self.stages * self.context_ranks)

    @property
    def step_tokens(self) -> int:
        """The maximum number of tokens of a step, of which each rank that divides tokens has the default's."""
        return SETTINGS.max_step_tokens * self.context_ranks

    @property
    def replicas(self) -> float:
        """The number of a worker's parts that compute different requests: GPUs, or stages by their throughput."""
        if self.expert_parallel:
            return self.gpus
        return STAGED_THROUGHPUT if self.stages > 1 else 1

    def _part(self, model: ModelSpec) -> ModelSpec:
        """Return the spec of the part of a model that each GPU holds; the first stage has the most layers."""
        model, _ = paged(model, self.kv_element_bytes)
        if self.expert_parallel:
            return local_experts_spec(model, self.gpus)
        check_token_division(model, self.context_ranks)
        return own_spec(model, Rank(0, self.tensor_ranks, 0, self.stages))

    def draft_step_ratio(self, demand: Demand) -> float:
        """Return the duration of a one-request decode step of the draft model ÷ that of the main model.

        It is that of the roofline, and 0 without a draft model.
        """
        if self.draft.model is None:
            return 0.0
        context = round(demand.context_tokens)
        costs = roofline(self.draft.model, self.device.ceilings), self.predicted_costs
        drafted_s, step_s = (StepCost(parameters).decode_step_seconds(1, context) for parameters in costs)
        return drafted_s / step_s

    def memory(self, demand: Demand) -> Memory:
        """Return the memory of each GPU."""
        return self._memory(demand, self.model, self.kv_element_bytes)

    def _memory(self, demand: Demand, model: ModelSpec, kv_element_bytes: float) -> Memory:
        model, page_tokens = paged(model, kv_element_bytes)
        part = self._part(model)
        a_token = kv_bytes_per_held_token(part, demand.kv_tokens, kv_element_bytes, page_tokens)
        draft = self.draft
        if self.gpus > 1 and not self.expert_parallel:
            # The first rank of a stage has the most: the whole embedding, or its part of the output layer, or both.
            first = [Rank(0, self.tensor_ranks, stage, self.stages) for stage in range(self.stages)]
            weights = max(rank_bytes(model, rank, torch.bfloat16, on_cpu=False) for rank in first)
        else:
            weights = matrix_bytes(part, ITEM_BYTES)
        return Memory(usable_bytes(self.device), weights, a_token, draft.weight_bytes, draft.kv_bytes_per_token(demand))

    def facts(self, demand: Demand) -> WorkerFacts:
        """Return the costs and capacity of one worker, or of each GPU of an expert-parallel worker."""
        kv_tokens, longest = self.memory(demand).kv_tokens, self.model.max_context
        step_tokens = self.step_tokens
        return WorkerFacts(self.costs, kv_tokens, GPU_BATCH_REQUESTS, step_tokens, longest, replicas=self.replicas)

    def hardware(self, demand: Demand) -> Hardware:
        """Return the hardware of a simulated worker, which is one GPU of an expert-parallel worker."""
        model, page_tokens = paged(self.model, self.kv_element_bytes)
        gpu_page_bytes = kv_page_bytes(self._part(model), self.kv_element_bytes, page_tokens)
        pages = int(self.memory(demand).kv_bytes / gpu_page_bytes)
        links = kv_page_bytes(model, self.kv_element_bytes, page_tokens) / gpu_page_bytes
        fitted, drafts = replace(self.costs, observed=1000), None
        if self.drafting is not None:
            drafts = self.drafting.simulated(StepCost(fitted), round(demand.context_tokens))
        return Hardware(
            model,
            self.name,
            fitted,
            fitted,
            pages,
            page_tokens,
            kv_element_bytes=self.kv_element_bytes,
            drafts=drafts,
            links=links,
            step_tokens=self.step_tokens,
        )

    def quantized_forms(self, demand: Demand) -> Iterator[Quantized]:
        """Yield the model with fewer bits of weights, of KV and of both, with their step costs by the roofline."""
        for option, kind in self.narrower_kinds():
            forms = [(option, kind)]
            if kind.model is not self.model:
                forms += [(f"{option} {kv_option}", both) for kv_option, both in kind.narrower_kinds()]
            for options, form in forms:
                yield Quantized(options, form.memory(demand), self.predicted_costs, form.predicted_costs)

    def narrower_kinds(self) -> Iterator[tuple[str, WorkerKind]]:
        """Yield the workers with weights in FP8 and in 4 bits and with KV in 8 bits, each after its option.

        Weights and KV that are already quantized are left out.
        """
        if self.model.quantization is None:
            for codes in (Codes.FLOAT8, Codes.INT4):
                yield f"--quantization {codes}", replace(self, model=quantized_at_load(self.model, codes))
        if (kv := self.narrower_kv()) is not None:
            yield "--kv-cache-dtype int8", replace(self, kv_element_bytes=kv)

    def narrower_kv(self) -> float | None:
        """Return the bytes of an 8-bit KV element.

        Returns None if the KV is already that narrow, or if 8-bit KV is unsupported.
        """
        try:
            element_bytes = kv_element_bytes(self.model, "int8")
        except InvalidArgument:
            return None
        return element_bytes if element_bytes < self.kv_element_bytes else None

    def groups(self) -> list[WorkerKind]:
        """Return these workers with each number of `group_sizes` that divides the model, or with the given number.

        The number of stages stays the same; if it divides none of `group_sizes`, each stage has one GPU. Ranks that
        divide tokens have one GPU each. Raises InvalidArgument if no number divides the model.
        """
        sizes = [gpus for gpus in self.group_sizes if gpus % self.stages == 0 and self.context_ranks == 1]
        kinds: list[WorkerKind] = []
        refused: InvalidArgument | None = None
        for gpus in sizes or [self.stages * self.context_ranks if self.group_sizes else self.gpus]:
            kind = replace(self, gpus=gpus)
            try:
                kind._part(self.model)
            except InvalidArgument as error:
                refused = error
            else:
                kinds.append(kind)
        if refused is not None and not kinds:
            raise refused
        return kinds

    def context_groups(self) -> list[WorkerKind]:
        """Return these workers with each number of `GROUP_SIZES` above 1 of ranks that divide the tokens of prompts.

        There is none if the tokens of the model cannot be divided.
        """
        try:
            check_token_division(self.model, GROUP_SIZES[-1])
        except InvalidArgument:
            return []
        return [replace(self, gpus=ranks, context_ranks=ranks, group_sizes=()) for ranks in GROUP_SIZES[1:]]

    def _what_fits(self, demand: Demand) -> str:
        """Return the end of an error message: the options with which a mean request fits, if there are any.

        These are a quantization, a number of GPUs for each worker, and a GPU with more memory.
        """
        kv = self.narrower_kv()
        fitting = [
            " ".join([f"--quantization {codes}"] * (model is not self.model) + ["--kv-cache-dtype int8"] * narrow)
            for codes, model in self.weight_forms()
            for narrow in ([False, True] if kv else [False])
            if self._memory(demand, model, kv if kv and narrow else self.kv_element_bytes).fits(demand)
        ]
        all_sizes = replace(self, group_sizes=GROUP_SIZES)
        groups = [kind.gpus for kind in all_sizes.groups() if kind.memory(demand).fits(demand)]
        larger = [name for name, kind in DEVICES.items() if replace(self, device=kind).memory(demand).fits(demand)]
        larger.sort(key=lambda name: DEVICES[name].memory_gib)
        choices = [
            *fitting[:1],
            *(f"--tensor-parallel-size {gpus // self.stages}" for gpus in groups[:1] if not self.expert_parallel),
            *(f"--gpu {name}" for name in larger[:1]),
        ]
        if choices:
            return f"it fits with {' or '.join(choices)}"
        return "it fits in fewer bits neither, and on no known GPU"

    def weight_forms(self) -> Iterator[tuple[str, ModelSpec]]:
        """Yield the model as it is and, if it is not quantized, with 8-bit and with 4-bit weights.

        Each is preceded by the value of `--quantization` that gives it, "" for the model as it is.
        """
        yield "", self.model
        if self.model.quantization is None:
            for codes in (Codes.INT8, Codes.INT4):
                yield codes.value, quantized_at_load(self.model, codes)

    def check_memory(self, demand: Demand) -> None:
        """Raise InvalidArgument if a mean request does not fit into a worker's memory or into the model's context."""
        memory = self.memory(demand)
        if not memory.fits(demand):
            weights = (memory.weight_bytes + memory.draft_weight_bytes) / GIB
            place = "" if self.gpus == 1 else f" on each of {self.gpus} GPUs"
            missing = f"{memory.kv_tokens:.0f} tokens of KV fit beside {weights:.0f} GiB of weights{place}"
            message = f"{missing}, and a request has {demand.kv_tokens:.0f}; {self._what_fits(demand)}"
            raise InvalidArgument("--gpu", message)
        if demand.kv_tokens > self.model.max_context:
            message = (
                f"prompt and answer have {demand.kv_tokens:.0f} tokens, {self.name} takes {self.model.max_context}"
            )
            raise InvalidArgument("--prompt-tokens", message)

    def check_prefill(self, demand: Demand, targets: LatencyTargets) -> None:
        """Raise InvalidArgument if even a prompt that is computed alone misses its TTFT target."""
        alone_s = demand.lone_prompt_seconds(StepCost(self.costs), self.step_tokens)
        if alone_s > targets.ttft_s:
            message = f"a prompt of {demand.computed_tokens:.0f} tokens alone takes {alone_s * 1e3:.0f} ms to compute"
            raise InvalidArgument("--slo-ttft", f"{message}; {_HELPS}")

    def check_decode(self, demand: Demand, targets: LatencyTargets) -> None:
        """Raise InvalidArgument if even the steps of a single request miss its ITL target."""
        step_s = StepCost(self.costs).decode_step_seconds(1, round(demand.context_tokens))
        if step_s > targets.gap_s:
            message = f"a single request has {step_s * 1e3:.1f} ms between its tokens"
            raise InvalidArgument("--slo-itl", f"{message}; {_HELPS}")
