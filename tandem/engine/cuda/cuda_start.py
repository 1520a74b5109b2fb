"""Starts an engine on a GPU after its weights are loaded.

It compiles kernels, measures the memory of a step, sizes the KV cache and captures the CUDA graphs.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from tandem.cost_model.step_grid import answer_slots
from tandem.engine.cache.paged_cache import PagedCache, cache_bytes, page_bytes
from tandem.engine.config import EngineConfig
from tandem.engine.config.kv import kv_groups
from tandem.engine.cuda.compile_ahead import Trial, run_side_by_side
from tandem.engine.cuda.cuda_graphs import DecodeGraphs, graph_sizes
from tandem.engine.cuda.cuda_stepper import CudaStepper, LeadingStepper
from tandem.engine.cuda.penalty_counts import PenaltyCounts
from tandem.engine.cuda.prompt_graphs import PromptGraphs, PromptSize, largest, prompt_graph_sizes
from tandem.engine.cuda.sampler_cuda import DeviceSampler
from tandem.engine.cuda.token_draws import TokenDraws
from tandem.engine.cuda.verify_graphs import VerifyGraphs, VerifySize, most_groups, verify_sizes
from tandem.engine.grammar_masks import GrammarMasks
from tandem.engine.host_stepper import Forward
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.engine.memory import GIB, kv_cache_bytes, measure_peak, naming_the_setting
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.parallel.collectives import Collectives
from tandem.engine.parallel.cuda_collectives import CudaCollectives
from tandem.engine.parallel.step_stream import RankStep
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.engine.steps.step_packer import StepPacker, step_limits
from tandem.engine.weights.checkpoint import Progress
from tandem.protocol.ending import pages_for
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import SamplingParams

log = logging.getLogger(__name__)

_MARGIN_BYTES = GIB // 4
"""The memory left free for fragmentation and for allocations that only some steps need."""
_COMPILED_PROMPT = 2048
"""The length in tokens of the trial prompt that compiles the kernels of long prompts."""
_SHORT_PROMPT = 2
"""The length in tokens of the shortest row that is not a decode row."""
_ANY = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The step sizes that get a graph: decode steps, prefill and mixed steps, and steps that verify draft tokens."""

    rows: list[int]
    prompts: list[PromptSize]
    verify: list[VerifySize]

    @property
    def largest(self) -> "_Sizes":
        """The largest sizes; the memory of their graphs suffices for the graphs of all other sizes."""
        return _Sizes(self.rows[-1:], largest(self.prompts), self.verify[-1:])


def start_on_gpu(
    config: EngineConfig,
    model: DecoderModel,
    page_tokens: int,
    kv_dtype: torch.dtype,
    device: torch.device,
    *,
    masks: GrammarMasks | None,
    progress: Progress | None,
    collectives: Collectives | None = None,
    on_step: Callable[[RankStep], None] | None = None,
) -> tuple[PagedCache, CudaStepper]:
    """Allocate a KV cache as large as the settings allow, capture the graphs, and return the cache and its stepper.

    The ranks of a group, which pass their `collectives`, do this at the same time; all get as many pages as the rank
    with the least memory has space for. The first rank passes `on_step`, which sends the steps after the start.

    Raises InvalidArgument, which names the setting to change, if there is not enough memory or if the GPU is too small
    for the model's kernels.
    """
    group = collectives
    assert group is None or isinstance(group, CudaCollectives)
    with naming_the_setting(device), _refusing_small_gpus(device):
        for rows, groups in most_groups(_verify_sizes(config, model)).items():
            model.kernels.reserve_draft_groups(groups, rows)
        probe = _one_row(config, model, page_tokens, kv_dtype, device)
        with contextlib.nullcontext() if group is None else group.suspended():
            _compile(config, model, probe)
        sizes = _every_size(config, model, group)
        steps = _measure_steps(config, model, probe, sizes) if config.kv_cache_bytes is None else 0
        del probe
        capacity = config.kv_cache_bytes
        if capacity is None:
            capacity = kv_cache_bytes(device, config.gpu_memory_fraction, steps + _MARGIN_BYTES)
        if group is not None:
            capacity = group.pool_bytes(capacity, page_bytes(model.spec, page_tokens, kv_dtype, model.dtype))
        # Allocated outside of inference mode, because the transfer and tests write into the cache as well.
        cache = _cache(config, model, page_tokens, capacity, kv_dtype=kv_dtype, device=device)
        stepper = _make_stepper(config, model, cache, sizes, progress, masks=masks, on_step=on_step)
    log.info("KV cache: %d pages, %.1f GiB", cache.pages, cache.pages * cache.page_bytes / GIB)
    return cache, stepper


@contextlib.contextmanager
def _refusing_small_gpus(device: torch.device) -> Iterator[None]:
    """Raise InvalidArgument if a kernel in the `with` block needs more shared memory than the GPU has.

    The tiles of the kernels are tuned on larger GPUs.
    """
    try:
        yield
    except OutOfResources as error:
        raise InvalidArgument(
            "device",
            f"{device} is too small for this model's kernels: they need {error.required} of {error.name}, it has"
            f" {error.limit}; use a data center's GPU (A100, H100, H200 or newer), or cpu.",
        ) from error


def _one_row(
    config: EngineConfig, model: DecoderModel, page_tokens: int, kv_dtype: torch.dtype, device: torch.device
) -> PagedCache:
    """Return the KV cache over which trial steps run; it has pages for the longest row of a prefill step."""
    row_tokens = min(config.max_step_tokens, model.spec.max_context)
    pages = len(kv_groups(model.spec)) * pages_for(row_tokens, page_tokens)
    capacity = cache_bytes(model.spec, pages, page_tokens, kv_dtype, model.dtype)
    return _cache(config, model, page_tokens, capacity, kv_dtype=kv_dtype, device=device)


def _cache(
    config: EngineConfig,
    model: DecoderModel,
    page_tokens: int,
    capacity: int,
    *,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> PagedCache:
    return PagedCache(
        model.spec,
        page_tokens,
        capacity,
        kv_dtype,
        device,
        step_tokens=config.max_step_tokens,
        model_dtype=model.dtype,
    )


def _measure_steps(config: EngineConfig, model: DecoderModel, probe: PagedCache, sizes: _Sizes) -> int:
    """Return the memory in bytes that the largest prefill step and the largest graphs need together.

    The step and the graphs use `probe`, a cache of one row. Smaller graphs reuse the memory of the largest ones.
    """
    row_tokens, device = min(config.max_step_tokens, model.spec.max_context), probe.device

    def run() -> CudaStepper:
        stepper = _make_stepper(config, model, probe, sizes.largest, None)
        with torch.inference_mode():
            stepper.launch(StepBatch(_prompt_rows(config.max_step_tokens, row_tokens, probe)))()
        return stepper

    return measure_peak(device, run)


def _compile(config: EngineConfig, model: DecoderModel, probe: PagedCache) -> None:
    """Compile most kernels of all steps while the GPU still has the memory to run many trials at a time."""
    device = probe.device
    stepper = _make_stepper(config, model, probe, _Sizes([], [], []), None)
    # Sampling trials come first, because trials with many rows wait for a library that compiles, and occupy the
    # compiling threads.
    trials: dict[str, Trial] = {**stepper.draws.trials(model.dtype)}
    if config.cuda_graphs:
        trials |= stepper.graphs.trials(graph_sizes(config.batch_requests))
        trials |= stepper.verify.trials(_verify_sizes(config, model))
    tokens = min(_COMPILED_PROMPT, config.max_step_tokens, step_limits(model.spec, probe).max_context)
    trials["a prefill step"] = lambda: stepper.logits(StepBatch(_prompt_rows(tokens, tokens, probe)))
    for number in model.trial_tokens:
        if number <= tokens:
            rows = _prompt_rows(number, number, probe)
            trials[f"a prefill step of {number} tokens"] = partial(stepper.logits, StepBatch(rows))
    for slots in answer_slots(min(config.batch_requests, config.max_step_tokens - _SHORT_PROMPT)):
        trials[f"a mixed step of {slots} decode rows"] = partial(stepper.logits, _mixed_step(slots, probe))
    later = _prompt_rows(tokens, tokens, probe, cached=tokens // 2)
    trials["a prefill step behind cached tokens"] = lambda: stepper.logits(StepBatch(later))
    run_side_by_side(trials, device)
    with torch.inference_mode():
        model.kernels.end_trials()


def _prompt_rows(tokens: int, row_tokens: int, probe: PagedCache, cached: int = 0) -> list[StepRow]:
    """Return prompt rows with `tokens` tokens in total; the first `cached` tokens of each row are not computed.

    All rows share the same pages, because the results are not used.
    """
    pages = range(probe.pages)
    lengths = [min(row_tokens, tokens - start) for start in range(0, tokens, row_tokens)]
    return [StepRow([0] * (length - cached), cached, pages, SamplingInput(_ANY, 0)) for length in lengths]


def _mixed_step(answers: int, probe: PagedCache) -> StepBatch:
    """Return a mixed step: a short prompt and `answers` decode rows."""
    return StepBatch([*_prompt_rows(answers, 1, probe), *_prompt_rows(_SHORT_PROMPT, _SHORT_PROMPT, probe)])


def _every_size(config: EngineConfig, model: DecoderModel, group: Collectives | None) -> _Sizes:
    """Return the sizes of all graphs, which are the same on all ranks of a group."""
    if not config.cuda_graphs:
        return _Sizes([], [], [])
    rows, verify = graph_sizes(config.batch_requests), _verify_sizes(config, model)
    if not model.kernels.prompts_capturable:
        return _Sizes(rows, [], verify)
    divides_tokens = group is not None and group.rank.divides_tokens
    limits = config.max_step_tokens, config.batch_requests
    prompts = prompt_graph_sizes(model.spec, *limits, divides_tokens=divides_tokens)
    most = model.kernels.capturable_tokens
    prompts = [size for size in prompts if most is None or size.tokens <= most]
    if group is not None:
        # The layers of two stages may differ in width, and the graphs of prompts depend on it.
        most = group.minimum(max((size.tokens for size in prompts), default=0))
        prompts = [size for size in prompts if size.tokens <= most]
    return _Sizes(rows, prompts, verify)


def _verify_sizes(config: EngineConfig, model: DecoderModel) -> list[VerifySize]:
    if not (config.cuda_graphs and config.draft_graphs and model.kernels.drafts_capturable):
        return []
    states = model.spec.has_states
    return verify_sizes(model.kernels, config.batch_requests, config.max_step_tokens, states=states)


def _make_stepper(
    config: EngineConfig,
    model: DecoderModel,
    cache: PagedCache,
    sizes: _Sizes,
    progress: Progress | None,
    *,
    masks: GrammarMasks | None = None,
    on_step: Callable[[RankStep], None] | None = None,
) -> CudaStepper:
    device = cache.device
    packer = StepPacker(step_limits(model.spec, cache))
    forward = Forward(model, cache)
    # Every row of a step may sample a token, and a step of short prompts may have as many rows as tokens.
    drawn = torch.zeros(max(config.batch_requests, config.max_step_tokens), dtype=torch.int64, device=device)
    sampler = DeviceSampler(model.spec.vocab_size, config.batch_requests, device, overlaps_launches())
    with torch.inference_mode():
        pool = torch.cuda.graph_pool_handle()
        prompts = PromptGraphs(packer, forward, drawn, pool, model.kernels.capturable_pages)
        prompts.capture(sizes.prompts, progress)
        graphs = DecodeGraphs(packer, forward, sampler, drawn, pool)
        graphs.capture(sizes.rows, progress)
        verify = VerifyGraphs(packer, forward, sampler, drawn, pool)
        verify.capture(sizes.verify, progress)
        counts = PenaltyCounts(model.spec.vocab_size, config.batch_requests, device)
        draws = TokenDraws(sampler, counts, drawn, model.spec.eos_token_ids, masks, pdl=overlaps_launches())
    make = CudaStepper if on_step is None else partial(LeadingStepper, on_step=on_step)
    return make(packer, forward, draws, drawn, graphs=graphs, prompts=prompts, verify=verify)
