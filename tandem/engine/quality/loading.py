"""Loads an engine for a comparison with only the KV pages that it needs, so that two engines fit on one device."""

from dataclasses import replace

from tandem.engine.cache.paged_cache import cache_bytes
from tandem.engine.config import EngineConfig
from tandem.engine.config.kv import kv_groups
from tandem.engine.device import parse_device, parse_dtype, parse_kv_dtype, parse_pages
from tandem.engine.kernels.base import Kernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.load_spec import load_spec
from tandem.engine.quality.teacher_forced import COMPANY
from tandem.engine.weights.checkpoint import Progress

_SPARE_PAGES = 4
"""The number of additional pages in each group of layers, for output tokens."""


def load_for_comparison(
    config: EngineConfig, tokens: int, progress: Progress | None = None, *, kernels: Kernels | None = None
) -> ModelRunner:
    """Load an engine whose KV cache has space for at most `COMPANY` samples with `tokens` tokens in total.

    The settings `kv_cache_bytes` and `max_batch_requests` of `config` are replaced. `kernels` and the errors are those
    of `ModelRunner.load`.
    """
    device = parse_device(config.device)
    spec, page_tokens = parse_pages(config, device, load_spec(config.served.model))
    pages = (-(-tokens // page_tokens) + COMPANY + _SPARE_PAGES) * len(kv_groups(spec))
    dtypes = parse_kv_dtype(config, device, spec), parse_dtype(config, device, spec)
    capacity = cache_bytes(spec, pages, page_tokens, *dtypes)
    sized = replace(config, kv_cache_bytes=capacity, max_batch_requests=COMPANY)
    return ModelRunner.load(sized, progress, kernels=kernels)
