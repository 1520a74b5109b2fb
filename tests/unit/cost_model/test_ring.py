"""Ranks that divide tokens gather KV before they attend; a ring would attend to each part while the next one arrives.

The table in docs/decisions/tensor_parallelism.md is `figures` of these cases.
"""

from dataclasses import dataclass

import pytest

from tandem.capacity.simulation.hardware import ITEM_BYTES, roofline
from tandem.cost_model.devices import DEVICES
from tandem.engine.config.model import GroupedQueryAttention
from tandem.engine.model_sizes import kv_bytes_per_token
from tandem.engine.models.shapes import shape_config

STEP_TOKENS = 8192
NCCL_S = 19e-6
LINKS = {"NVLink": 400e9, "PCIe": 50e9, "network": 25e9}
"""Bytes per second that a gather reaches in one direction."""


@dataclass(frozen=True)
class Figures:
    """How many times as fast as one GPU, the part of its time that the ring saves, and the part that it transfers."""

    speedup: float
    ring_gain: float
    transferred: float


def figures(shape: str, ranks: int, tokens: int, link: float) -> Figures:
    """Returns those of a prompt in steps of `STEP_TOKENS` on H200, by the step costs of one GPU.

    The KV of earlier steps is in every rank's cache, so that a ring begins with it and with the rank's own part. After
    each hop, the results so far, in float32, are merged with those of the part: two are read, and one is written.
    """
    spec, device = shape_config(shape), DEVICES["H200"].ceilings
    cost, depth, attention = roofline(spec, device), len(spec.layers), spec.layers[0].attention
    assert isinstance(attention, GroupedQueryAttention)
    heads_bytes = 4 * attention.shape.heads * attention.shape.head_dim
    alone_s = gather_s = ring_s = transfer_s = 0.0
    for start in range(0, tokens, STEP_TOKENS):
        count = min(STEP_TOKENS, tokens - start)
        fixed_s = cost.base_s + cost.prompt_base_s
        own = count / ranks
        products_s = cost.token_s * own / depth
        earlier_s = cost.pair_s * own * start / depth
        part_s = cost.pair_s * own * count / 2 / ranks / depth
        moved_s = own * kv_bytes_per_token(spec, ITEM_BYTES) / depth / link
        hop_s, merge_s = moved_s + NCCL_S, 3 * heads_bytes * own / device.bytes_per_s
        exchange_s = (ranks - 1) * moved_s + NCCL_S
        alone_s += fixed_s + depth * ranks * (products_s + earlier_s + ranks * part_s)
        gather_s += fixed_s + depth * (products_s + earlier_s + ranks * part_s + exchange_s)
        first_s, hops = max(earlier_s + part_s, hop_s), ranks - 2
        ring_s += fixed_s + depth * (products_s + first_s + hops * max(part_s, hop_s) + part_s + (ranks - 1) * merge_s)
        transfer_s += depth * exchange_s
    return Figures(alone_s / gather_s, 1 - ring_s / gather_s, transfer_s / gather_s)


@pytest.mark.parametrize("shape", ["llama-3-8b", "llama-3-70b", "qwen3-30b-a3b"])
def test_a_ring_gains_nothing_over_nvlink_and_little_over_other_links(shape: str) -> None:
    for name, most in (("NVLink", 0.005), ("PCIe", 0.10), ("network", 0.10)):
        for ranks in (2, 4, 8):
            for tokens in (8192, 32_768, 131_072):
                figure = figures(shape, ranks, tokens, LINKS[name])
                assert figure.speedup > 0.3 * ranks, "dividing tokens pays"
                assert figure.ring_gain <= most, (name, ranks, tokens)
                assert figure.ring_gain < figure.transferred, "what is left is more than the ring gains"
