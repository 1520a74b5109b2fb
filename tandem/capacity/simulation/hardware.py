"""A model on devices of one kind, with step costs from a roofline or from fitted parameters."""

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from tandem.capacity.simulation.drafts import Drafts
from tandem.capacity.simulation.spec import Device
from tandem.cost_model.roofline import GPU, guess
from tandem.cost_model.step_collectives import with_divided_tokens
from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.cost_model.step_grid import gpu_grid
from tandem.engine.cache.paged_cache import choose_pages, page_bytes, used_bytes
from tandem.engine.config.kv import KvGroup, kv_groups, kv_windows, page_elements
from tandem.engine.config.model import ModelSpec
from tandem.engine.config.sharding import Rank, computed_spec, rank_spec
from tandem.engine.device import quantized_kv_dtype
from tandem.engine.model_sizes import (
    context_collectives,
    expert_exchange,
    kv_bytes_per_token,
    local_experts_sizes,
    model_sizes,
    step_collectives,
)
from tandem.engine.models.load_spec import quantized_at_load
from tandem.engine.models.shapes import shape_config
from tandem.protocol.cost_parameters import SECONDS
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import ModelFacts
from tandem.settings.ceilings import Ceilings
from tandem.settings.engine import GPU_PAGE_TOKENS, EngineSettings

ITEM_BYTES = 2
"""Bytes of an element of KV or weights that are not quantized."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A model on devices of one kind: steps take `actual_cost`; workers report `reported_cost` for predictions."""

    model: ModelSpec
    name: str
    actual_cost: CostParameters
    reported_cost: CostParameters
    pages: int
    page_tokens: int = GPU_PAGE_TOKENS
    kv_element_bytes: float = ITEM_BYTES
    drafts: Drafts | None = None
    """The draft tokens of workers that decode; None = no speculative decoding."""
    links: float = 1.0
    """Number of network links of a worker, see `Device.links`."""
    step_tokens: int = EngineSettings().max_step_tokens
    """The maximum number of tokens of a step."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's KV in all layers."""
        return kv_bytes_per_token(self.model, self.kv_element_bytes)

    @property
    def idle_step_s(self) -> float:
        """Duration in seconds of a decode step of one request without context."""
        return StepCost(self.actual_cost).idle_step_s

    @property
    def facts(self) -> ModelFacts:
        """The facts about the model as a worker registers them."""
        model = self.model
        windows = kv_windows(model)
        return ModelFacts(
            self.name, model.vocab_size, model.max_context, model.eos_token_ids, "bfloat16", kv_windows=windows
        )

    @property
    def device(self) -> Device:
        """The simulated device of one worker."""
        return Device(self.actual_cost, self.reported_cost, self.pages, self.page_tokens, self.page_bytes, self.links)

    @property
    def page_bytes(self) -> int:
        """Bytes of a KV page."""
        return kv_page_bytes(self.model, self.kv_element_bytes, self.page_tokens)


def paged(model: ModelSpec, element_bytes: float = ITEM_BYTES) -> tuple[ModelSpec, int]:
    """Return the model with the number of layers per page, and the tokens per page, that a worker on a GPU chooses."""
    return choose_pages(model, None, GPU_PAGE_TOKENS, _kv_dtype(element_bytes), torch.bfloat16)


def kv_element_bytes(model: ModelSpec, kv_cache_dtype: str) -> float:
    """Return the bytes of one KV element, including its share of a quantization scale.

    Raises InvalidArgument in the same cases as `quantized_kv_dtype`.
    """
    dtype = quantized_kv_dtype(kv_cache_dtype, model) or torch.bfloat16
    groups = (group for group in kv_groups(model) if isinstance(group, KvGroup))
    return max(used_bytes(group, 1, dtype) for group in groups) / page_elements(model)


def kv_bytes_per_held_token(
    model: ModelSpec, tokens: float, element_bytes: float = ITEM_BYTES, page_tokens: int = GPU_PAGE_TOKENS
) -> float:
    """Return the KV bytes per token of a decoding request of `tokens` tokens.

    In a model with sliding windows or state layers, this is the size of the whole pages that a worker reserves
    (`KvPages.held`) ÷ `tokens`.
    """
    pages = KvPages(page_tokens, kv_windows(model))
    if not pages.windowed:
        return kv_bytes_per_token(model, element_bytes)
    return pages.held(math.ceil(tokens), decoding=True) * kv_page_bytes(model, element_bytes, page_tokens) / tokens


def kv_page_bytes(model: ModelSpec, element_bytes: float = ITEM_BYTES, page_tokens: int = GPU_PAGE_TOKENS) -> int:
    """Return the bytes of a KV page; a model with state layers is one that `paged` returned, or a rank's part of it."""
    return page_bytes(model, page_tokens, _kv_dtype(element_bytes), torch.bfloat16)


def _kv_dtype(element_bytes: float) -> torch.dtype:
    return torch.bfloat16 if element_bytes >= ITEM_BYTES else torch.int8


def roofline(
    model: ModelSpec,
    device: Ceilings = GPU,
    kv_element_bytes: float = ITEM_BYTES,
    ranks: int = 1,
    *,
    context_ranks: int = 1,
) -> CostParameters:
    """Return the step cost at the device's ceilings, marked as measured so that policies rely on it.

    If the model is divided among several ranks, the cost is that of a rank's part, plus the collective operations. If
    `context_ranks` ranks with the whole model divide the tokens of prompts, it is that of a rank's tokens, plus those.
    """
    part = computed_spec(model, Rank(0, ranks))
    cost = guess(model_sizes(part, ITEM_BYTES, kv_element_bytes), device, gpu_grid(part.heads))
    if ranks > 1:
        cost = step_collectives(model, ranks, ITEM_BYTES, device).added_to(cost)
    if context_ranks > 1:
        gathers = context_collectives(model, context_ranks, ITEM_BYTES, kv_element_bytes, device)
        cost = gathers.added_to(with_divided_tokens(cost, context_ranks))
    return replace(cost, observed=1000)


def expert_parallel_roofline(
    model: ModelSpec, device: Ceilings, kv_element_bytes: float, gpus: int, *, two_batch_overlap: bool
) -> CostParameters:
    """Return the step cost of each of `gpus` GPUs over several hosts, which divide the experts among them.

    Each GPU has its own requests. All GPUs have equally many tokens, and all experts are chosen equally often.
    """
    sizes, exchange = local_experts_sizes(model, gpus, ITEM_BYTES, kv_element_bytes), expert_exchange(model, gpus)
    cost = guess(sizes, device)
    if two_batch_overlap:
        cost = exchange.overlapped_by(cost, (sizes.weight_bytes + sizes.expert_bytes) / device.bytes_per_s)
    else:
        cost = exchange.added_to(cost)
    return replace(cost, observed=1000)


def read_costs(file: Path, option: str = "--costs") -> CostParameters:
    """Read fitted parameters with the names of `CostParameters` from a JSON file, at the top level or under `costs`.

    Raises InvalidArgument, which names `option`, if the file cannot be read or has unknown names.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(option, f"{file.name} cannot be read: {error}") from None
    content = content.get("costs", content)
    known = {parameter.name for parameter in fields(CostParameters)}
    strange = set(content) - known
    if strange:
        raise InvalidArgument(option, f"{file.name} has {', '.join(sorted(strange))}; known are {', '.join(known)}")
    return CostParameters(**({"observed": 1000} | content))


def hardware(
    shape: str,
    costs: Path | None,
    kv_gib: float,
    misjudged: float,
    *,
    device: Ceilings = GPU,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    ranks: int = 1,
) -> Hardware:
    """Return a model on devices whose predicted step costs are `misjudged` times the real ones.

    The real costs are those of the file `costs` or, without it, the roofline of `device` for the quantized weights and
    KV. Each worker has `ranks` devices, with `kv_gib` GiB of KV pages each. Raises InvalidArgument if the KV cache is
    smaller than a page, or if the model does not support the quantization or cannot be divided among the ranks.
    """
    model = quantized_at_load(shape_config(shape), quantization)
    element_bytes = kv_element_bytes(model, kv_cache_dtype)
    if not misjudged > 0:
        raise InvalidArgument("--misjudged", f"{misjudged:g} is not above 0")
    actual_cost = roofline(model, device, element_bytes, ranks) if costs is None else read_costs(costs)
    scaled = {name: getattr(actual_cost, name) * misjudged for name in SECONDS}
    model, page_tokens = paged(model, element_bytes)
    rank_page_bytes = kv_page_bytes(rank_spec(model, ranks), element_bytes, page_tokens)
    pages = int(kv_gib * 2**30 / rank_page_bytes)
    if pages < 1:
        raise InvalidArgument("--kv-gib", f"{kv_gib:g} is less than one KV page of {shape}")
    links = kv_page_bytes(model, element_bytes, page_tokens) / rank_page_bytes
    reported_cost = replace(actual_cost, **scaled)
    return Hardware(
        model, shape, actual_cost, reported_cost, pages, page_tokens, kv_element_bytes=element_bytes, links=links
    )
