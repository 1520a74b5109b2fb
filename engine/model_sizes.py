"""The bytes and operations of a model's step, from the model's shape."""

import torch

from costs.roofline import CPU, GPU, ModelSizes, Roofline, guess
from costs.step_cost import CostParameters
from costs.step_grid import EACH_TOKEN, StepGrid, gpu_grid
from engine.cache.paged_cache import PagedCache
from engine.config.model import ModelConfig

_ATTENTION_FLOP = 4
"""Operations per query, key and dimension: the score and the weighted value, each a product and a sum."""


def model_sizes(config: ModelConfig, cache: PagedCache) -> ModelSizes:
    """Returns the sizes of the matrices alone: norms, biases and the embedding of a few tokens are negligible."""
    output = config.vocab_size * config.hidden_size
    weights = config.layers * layer_weights(config) + output
    return ModelSizes(
        weights=weights,
        weight_bytes=weights * cache.item_bytes,
        kv_bytes_per_token=cache.page_bytes // cache.page_tokens,
        attention_flop_per_pair=_ATTENTION_FLOP * config.layers * config.heads * config.head_dim,
        output_weights=output,
    )


def layer_weights(config: ModelConfig) -> int:
    """Returns the number of elements in the matrices of one layer."""
    attention = config.qkv_size + config.heads * config.head_dim
    return config.hidden_size * (attention + 3 * config.intermediate_size)


def roofline(config: ModelConfig, cache: PagedCache) -> Roofline:
    """Returns the roofline of the model on this kind of device."""
    return Roofline(model_sizes(config, cache), GPU if cache.tensor.is_cuda else CPU)


def cost_guess(config: ModelConfig, cache: PagedCache) -> CostParameters:
    """Returns the predicted cost of steps on this device, before one was measured."""
    limits, grid = roofline(config, cache), step_grid(config, cache.tensor.device)
    return guess(limits.sizes, limits.ceilings, grid)


def step_grid(config: ModelConfig, device: torch.device) -> StepGrid:
    """Returns the granularity in which `device` computes prefill steps."""
    if device.type != "cuda":
        return EACH_TOKEN
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return gpu_grid(config.heads, multiprocessors)
