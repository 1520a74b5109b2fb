"""Models that are divided among pipeline stages compute what one rank computes, and their KV can be handed over."""

from pathlib import Path

import pytest
import torch

from kv_transfer.rank_plan import even_stages, plan_handoff
from tandem.engine.config.sharding import Rank, own_spec
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.load_spec import load_spec, parse_spec
from tandem.protocol.errors import InvalidArgument
from tandem.worker.transfer import ranked_pages
from tests.factories import FAMILIES, tiny_engine_config, write_tiny_model
from tests.ranks import group_runner
from tests.soak import soak
from tests.unit.engine.parallel.test_ranks import TOLERANCE, assert_same_logits, changed, logits_of
from tests.unit.engine.weights.quantized_folders import write_quantized

POOL = 8 << 20
PAGES = 16
"""At least as many pages as the steps of `logits_of` write to."""
STAGED = sorted(
    family
    for family in FAMILIES.keys()
    - {"gemma4_e2b", "gemma4_experts", "glm_moe_dsa", "llama4", "mimo_v2_flash", "ministral", "qwen2_windows"}
    if not parse_spec(FAMILIES[family]).has_states
)
"""The families whose tiny models can be divided among two stages; Gemma 2 with six layers."""


def test_the_stages_divide_the_layers_in_order_and_the_first_rank_is_in_the_last_stage() -> None:
    ranks = [Rank.of(number, 2, 4) for number in range(8)]
    assert [rank.world_number for rank in ranks] == list(range(8))
    assert [rank.stage for rank in ranks] == [3, 3, 2, 2, 1, 1, 0, 0]
    assert [len(rank.page_layers(61)) for rank in ranks] == [15, 15, 15, 15, 15, 15, 16, 16]
    assert tuple(tuple(rank.page_layers(61)) for rank in ranks[::2]) == even_stages(61, 4)
    assert [rank.world_number for rank in ranks if rank.leads] == [0]
    assert [rank.world_number for rank in ranks if rank.embeds] == [6]


@pytest.mark.parametrize(
    ("family", "ranks", "stages"),
    [
        ("llama3", 1, 2),
        ("smollm2", 1, 3),
        ("biased", 2, 2),
        ("gemma2", 1, 2),
        ("gpt_oss", 1, 2),
        ("qwen3", 2, 3),
        ("deepseek_v3", 1, 3),
        *(pytest.param(family, 1, 2, marks=soak) for family in STAGED),
        *(pytest.param(family, 3, 2, marks=soak) for family in STAGED if family not in {"gemma4", "olmoe"}),
    ],
)
def test_logits_are_those_of_one_rank(family: str, ranks: int, stages: int, tmp_path: Path) -> None:
    sizes = changed(family, ranks) | ({"num_hidden_layers": 6} if family == "gemma2" else {})
    folder = write_tiny_model(tmp_path, family, **sizes)
    assert_same_logits(tiny_engine_config(folder, kv_cache_bytes=POOL), ranks, stages=stages)


@pytest.mark.parametrize("case", ["awq", "gptq desc_act"])
def test_the_stages_read_their_layers_of_a_quantized_model(case: str, tmp_path: Path) -> None:
    folder, _ = write_quantized(tmp_path, case, "llama3")
    assert_same_logits(tiny_engine_config(folder, kv_cache_bytes=POOL), 2, stages=2)


@pytest.mark.parametrize(("family", "stages"), [("ministral", 2), ("llama3", 4), ("gpt_oss", 4), ("gemma4_e2b", 2)])
def test_a_model_that_stages_cannot_divide_is_refused(family: str, stages: int, tmp_path: Path) -> None:
    spec = load_spec(write_tiny_model(tmp_path, family))
    with pytest.raises(InvalidArgument, match="stage") as caught:
        own_spec(spec, Rank(stages=stages))
    assert caught.value.field == "pipeline_parallel_size"


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype", "ranks", "stages"),
    [
        ("llama3", "auto", 1, 2),
        ("gpt_oss", "auto", 1, 2),
        ("smollm2", "int8", 1, 3),
        ("deepseek_v3", "int8", 1, 2),
        ("llama2", "auto", 2, 2),
    ],
)
def test_a_hand_over_to_one_rank_gives_the_pages_that_this_rank_would_compute(
    family: str, kv_cache_dtype: str, ranks: int, stages: int, tmp_path: Path
) -> None:
    """With stages alone, to the bit and with the checksums; sums of ranks differ in the last bits."""
    folder = write_tiny_model(tmp_path, family)
    config = tiny_engine_config(folder, kv_cache_bytes=POOL, kv_cache_dtype=kv_cache_dtype)
    alone = ModelRunner.load(config, kernels=ReferenceKernels())
    logits_of(alone)
    with group_runner(config, ranks, stages) as (runner, followers):
        logits_of(runner)
        caches = [runner.cache, *(follower.cache for follower in followers)]
    assert len({cache.pages for cache in caches}) == 1, "a page has the same number on all ranks"

    target = ranked_pages(alone.cache, alone.page_parts, 1, 1)
    source = ranked_pages(runner.cache, runner.page_parts, ranks * stages, stages)
    computed = alone.cache.storage.view(torch.uint8)
    received = torch.zeros_like(computed)
    assert len(set(source)) == len(set(target)) == 1
    for copy in plan_handoff(source[0], target[0]):
        stored = caches[copy.source_rank].storage.view(torch.uint8)
        received[:PAGES, copy.target_start : copy.target_end] = stored[:PAGES, copy.source_start : copy.source_end]
    if ranks == 1:
        assert torch.equal(received[:PAGES], computed[:PAGES])
        checked = range(PAGES), [alone.page_tokens] * PAGES
        parts = [engine.page_sums(*checked) for engine in (runner, *followers)]
        assert [sum(sums) % (1 << 64) for sums in zip(*parts, strict=True)] == [*alone.page_sums(*checked)]
    else:
        assert_close = torch.testing.assert_close
        assert_close(received.view(torch.float32), computed.view(torch.float32), atol=TOLERANCE, rtol=TOLERANCE)
