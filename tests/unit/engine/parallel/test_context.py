"""Ranks that divide the tokens of prompts compute what one rank computes, and all have the KV of all tokens."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tandem.engine.cache.paged_cache import PagedCache
from tandem.engine.config.sharding import Rank
from tandem.engine.kernels.kv_cache import kv_of, tensors_of
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.parallel.context_model import row_parts
from tandem.engine.steps.batch import StepBatch
from tandem.protocol.errors import InvalidArgument
from tests.factories import row, tiny_engine_config, write_tiny_model
from tests.ranks import Boards, ThreadCollectives, group_runner

TOLERANCE = 2e-5
IDS = [(7 * position + 3) % 157 for position in range(60)]
FAMILIES = ("llama3", "qwen3_moe", "gpt_oss", "gemma3", "gemma4", "mimo_v2_flash", "deepseek_v3", "deepseek_v32")
"""GQA, a mixture of experts, windows with sinks, windows in groups, latent attention, and that of chosen tokens."""


def steps(pages: list[int]) -> list[StepBatch]:
    """Returns two chunks of a prompt, a third beside two other prompts, a short step, and one token beside a chunk."""
    third = len(pages) // 3
    mine, other, short = pages[:third], pages[third : 2 * third], pages[2 * third :]
    return [
        StepBatch([row(IDS[:21], 0, mine, drawn=False)]),
        StepBatch([row(IDS[21:40], 21, mine)]),
        StepBatch([row(IDS[40:47], 40, mine), row(IDS[::-1][:17], 0, other), row(IDS[:5], 0, short)]),
        StepBatch([row(IDS[47:49], 47, mine)]),
        StepBatch([row(IDS[49:50], 49, mine), row(IDS[::-1][17:30], 17, other)]),
        StepBatch([row(IDS[50:51], 50, mine), row(IDS[::-1][30:31], 30, other)]),
    ]


def logits_of(runner: ModelRunner) -> list[torch.Tensor]:
    kv = runner.cache.kv_pages
    pages = list(range(3 * kv.numbers(len(IDS)) * kv.groups))
    return [runner.logits(batch).clone() for batch in steps(pages)]


def stored(cache: PagedCache) -> list[torch.Tensor]:
    """Returns copies of the elements of a cache, or of its codes and scales."""
    return [tensor.clone() for view in cache.views for tensor in tensors_of(kv_of(view))]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("family", "kv_dtype"), [*((family, "auto") for family in FAMILIES), ("llama3", "int8")])
def test_logits_and_kv_are_those_of_one_rank(family: str, kv_dtype: str, ranks: int, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family, **({"num_kv_shared_layers": 2} if family == "gemma4" else {}))
    config = tiny_engine_config(folder, kv_cache_bytes=8 << 20, kv_cache_dtype=kv_dtype)
    single = ModelRunner.load(config, kernels=ReferenceKernels())
    wanted = logits_of(single)
    with group_runner(config, ranks, divides_tokens=True) as (runner, followers):
        actual = logits_of(runner)
    # Only now have all ranks run the last step.
    caches = [stored(part.cache) for part in (runner, *followers)]
    # The last bit of a product, which depends on the number of its rows, can become that of an 8-bit code.
    tolerance = TOLERANCE if kv_dtype == "auto" else 5e-3
    for mine, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)
    assert caches[0][0].count_nonzero() > 0
    for cache in caches[1:]:
        assert all(map(torch.equal, cache, caches[0]))
    for mine, theirs in zip(caches[0], stored(single.cache), strict=True):
        code = TOLERANCE if mine.is_floating_point() else 1
        torch.testing.assert_close(mine, theirs, atol=code, rtol=TOLERANCE if mine.is_floating_point() else 0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_token_of_a_step_is_computed_by_one_rank(ranks: int) -> None:
    for row_starts in ([0, 2 * ranks], [0, 1, 2, 3 * ranks], [0, 5, 40, 41, 97]):
        parts = [row_parts(row_starts, Rank(number, ranks)) for number in range(ranks)]
        tokens = sorted(token for own in parts for part in own for token in range(part.start, part.end))
        assert tokens == list(range(row_starts[-1]))
        for own in parts:
            single = [part.end - part.start > 1 for part in own]
            assert single == sorted(single)
            assert all(row_starts[p.row] <= p.start < p.end <= row_starts[p.row + 1] for p in own)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_attend_to_equally_many_keys_of_a_long_prompt(ranks: int) -> None:
    length = 64 * ranks
    pairs = [
        sum(token + 1 for part in row_parts([0, length], Rank(number, ranks)) for token in range(part.start, part.end))
        for number in range(ranks)
    ]
    assert all(first == second for first, second in pairwise(pairs))


def test_drafts_are_refused(tmp_path: Path) -> None:
    config = tiny_engine_config(write_tiny_model(tmp_path, "llama3"), kv_cache_bytes=8 << 20, keep_hidden=True)
    collectives = ThreadCollectives(Rank(0, 2, divides_tokens=True), Boards(2))
    with pytest.raises(InvalidArgument, match="do not decode") as caught:
        ModelRunner.load(config, kernels=ReferenceKernels(), collectives=collectives)
    assert caught.value.field == "draft"


@pytest.mark.parametrize(
    ("family", "reason"),
    [("qwen3_next", "a state depends on all earlier tokens"), ("gemma4_e2b", "embeddings of each layer")],
)
def test_the_tokens_of_some_models_are_not_divided(family: str, reason: str, tmp_path: Path) -> None:
    config = tiny_engine_config(write_tiny_model(tmp_path, family))
    with pytest.raises(InvalidArgument, match=reason):
        ModelRunner.load(config, collectives=ThreadCollectives(Rank(0, 2, divides_tokens=True), Boards(2)))
