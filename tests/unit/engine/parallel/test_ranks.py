"""Models that are divided among ranks compute what one rank computes."""

import threading
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.config.model import MixtureOfExperts
from tandem.engine.config.sharding import Rank, rank_spec
from tandem.engine.kernels.layers import Experts, Linear, Norm
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels, rms_norm
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.load_spec import load_spec
from tandem.engine.models.parameters import tensors_of
from tandem.engine.models.rank_parameters import allocate_rank, rank_bytes
from tandem.engine.steps.batch import StepBatch
from tandem.engine.steps.prompt_scoring import PromptScores
from tandem.engine.weights.checkpoint import check_model
from tandem.protocol.errors import InvalidArgument
from tests.factories import FAMILIES, row, tiny_engine_config, write_tiny_model
from tests.ranks import ThreadCollectives, group_runner
from tests.soak import soak
from tests.unit.engine.weights.quantized_folders import write_mxfp4, write_quantized

TOLERANCE = 2e-5
IDS = [(7 * position + 3) % 157 for position in range(60)]
THREE: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_size": 96,
    "head_dim": 32,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 96,
}


def steps(pages: list[int]) -> list[StepBatch]:
    """Returns a chunk without a draw, one with, and two steps of one token beside another prompt."""
    mine, other = pages[: len(pages) // 2], pages[len(pages) // 2 :]
    return [
        StepBatch([row(IDS[:21], 0, mine, drawn=False)]),
        StepBatch([row(IDS[21:40], 21, mine)]),
        StepBatch([row(IDS[40:41], 40, mine), row(IDS[::-1][:17], 0, other)]),
        StepBatch([row(IDS[41:42], 41, mine), row(IDS[::-1][17:18], 17, other)]),
    ]


def logits_of(runner: ModelRunner) -> list[torch.Tensor]:
    kv = runner.cache.kv_pages
    pages = list(range(2 * kv.numbers(len(IDS)) * kv.groups))
    return [runner.logits(batch).clone() for batch in steps(pages)]


INDIVISIBLE = {
    ("smollm2", 2),
    ("smollm2", 4),
    ("kimi_linear", 3),
    ("lfm2", 3),
    *product(("lfm2", "lfm2_moe"), (4,)),
    *product(
        (
            "bamba",
            "granitemoehybrid_experts",
            "nemotron_h",
            "nemotron_h_experts",
            "nemotron_h_latent",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_next",
        ),
        (3, 4),
    ),
    *product(("gemma4_e2b", "granitemoehybrid", "minimax_m2", "olmo2", "olmo3", "olmo_hybrid", "olmoe"), (2, 3, 4)),
}
"""Three heads, few groups of heads in state layers, a norm over all heads of a query, embeddings of each layer."""
NUMBERS = {family: number for number, family in enumerate(sorted(FAMILIES))}
"""Each family is tested with one number of ranks in `make test`."""
DIVISIBLE = [case for case in product(sorted(FAMILIES), (2, 3, 4)) if case not in INDIVISIBLE]


def changed(family: str, ranks: int) -> dict[str, Any]:
    """Returns the sizes of a model that three ranks can divide."""
    return {key: value for key, value in THREE.items() if key in FAMILIES[family]} if ranks == 3 else {}


def assert_same_logits(config: EngineConfig, ranks: int, tolerance: float = TOLERANCE, stages: int = 1) -> None:
    wanted = logits_of(ModelRunner.load(config, kernels=ReferenceKernels()))
    with group_runner(config, ranks, stages) as (runner, _):
        actual = logits_of(runner)
    for mine, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        pytest.param(family, ranks, marks=() if ranks == 2 + NUMBERS[family] % 3 or family == "smollm2" else soak)
        for family, ranks in DIVISIBLE
    ],
)
def test_logits_are_those_of_one_rank(family: str, ranks: int, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family, **changed(family, ranks))
    assert_same_logits(tiny_engine_config(folder, kv_cache_bytes=8 << 20), ranks)


@pytest.mark.parametrize(("family", "ranks"), sorted(INDIVISIBLE))
def test_a_model_that_cannot_be_divided_is_refused(family: str, ranks: int, tmp_path: Path) -> None:
    spec = load_spec(write_tiny_model(tmp_path, family, **changed(family, ranks)))
    with pytest.raises(InvalidArgument, match=f"cannot be divided among {ranks} ranks") as caught:
        rank_spec(spec, ranks)
    assert caught.value.field == "tensor_parallel_size"


@pytest.mark.parametrize(
    ("case", "family"),
    [
        ("awq", "llama3"),
        ("gptq desc_act", "phi3"),
        ("W4A16 channel", "llama3"),
        ("W8A16", "phi3"),
        ("deepseek fp8", "llama3"),
        ("modelopt nvfp4", "phi3"),
        pytest.param("awq", "phi3", marks=soak),
        pytest.param("gptq desc_act", "llama3", marks=soak),
        pytest.param("W4A16 channel", "phi3", marks=soak),
        pytest.param("W8A16", "llama3", marks=soak),
        pytest.param("deepseek fp8", "phi3", marks=soak),
    ],
)
def test_quantized_weights_are_divided_by_groups(case: str, family: str, tmp_path: Path) -> None:
    folder, _ = write_quantized(tmp_path, case, family)
    # FP8 products round their inputs, so that the last bit of a sum can become that of a code.
    tolerance = 5e-3 if "fp8" in case else TOLERANCE
    assert_same_logits(tiny_engine_config(folder, kv_cache_bytes=8 << 20), 2, tolerance)


INDIVISIBLE_EXPERTS: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3_moe", 2, {"moe_intermediate_size": 33}),
    ("gpt_oss", 3, {**THREE, "intermediate_size": 64, "num_local_experts": 6}),
    ("deepseek_v3", 4, {"moe_intermediate_size": 33, "n_shared_experts": 4}),
    ("mixtral", 2, {"intermediate_size": 33}),
    ("granite_moe", 2, {"intermediate_size": 33}),
    ("gemma4_experts", 2, {"moe_intermediate_size": 33}),
]


@pytest.mark.parametrize(("family", "ranks", "changes"), INDIVISIBLE_EXPERTS)
def test_experts_whose_width_is_indivisible_are_whole_on_a_rank(
    family: str, ranks: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path, family, **changes)
    layers = [rank_spec(load_spec(folder), ranks, number).layers[-1].feed_forward for number in range(ranks)]
    assert all(isinstance(layer, MixtureOfExperts) and layer.local is not None for layer in layers)
    assert_same_logits(tiny_engine_config(folder, kv_cache_bytes=8 << 20), ranks)


def test_experts_whose_parts_would_be_dequantized_are_whole_on_a_rank(tmp_path: Path) -> None:
    """A rank's part of 24 columns, of 96 in groups of 32, would need groups of 8."""
    folder, _ = write_quantized(tmp_path, "awq", "qwen3_moe", moe_intermediate_size=96, num_experts=4)
    spec = check_model(folder)
    parameters = [allocate_rank(spec, Rank(number, 4), torch.float32, torch.device("meta")) for number in range(4)]
    for rank in parameters:
        experts = rank.layers[0].feed_forward
        assert isinstance(experts, Experts)
        assert isinstance(experts.down, PackedWeight)
        assert (tuple(experts.down.shape), experts.down.group) == ((1, 64, 96), 32)
    assert_same_logits(tiny_engine_config(folder, kv_cache_bytes=8 << 20), 4)
    for divisible, ranks in ((spec, 2), (replace(spec, quantization=None), 4)):
        parts = rank_spec(divisible, ranks).layers[0].feed_forward
        assert isinstance(parts, MixtureOfExperts)
        assert (parts.local, parts.width) == (None, 96 // ranks)


@pytest.mark.parametrize(("ranks", "width"), [(2, 32), (4, 64)])
def test_mxfp4_experts_are_divided_by_groups_or_are_whole_on_a_rank(ranks: int, width: int, tmp_path: Path) -> None:
    """Gate and up rows alternate in the checkpoint; a quarter of 64 columns is no group."""
    folder, _ = write_mxfp4(tmp_path)
    experts = rank_spec(check_model(folder), ranks).layers[0].feed_forward
    assert isinstance(experts, MixtureOfExperts)
    assert experts.width == width
    assert_same_logits(tiny_engine_config(folder, kv_cache_bytes=8 << 20), ranks)


def test_ranks_with_an_eight_bit_cache_give_the_tokens_of_one_rank(tmp_path: Path) -> None:
    config = tiny_engine_config(write_tiny_model(tmp_path), kv_cache_bytes=8 << 20, kv_cache_dtype="int8")
    assert_same_logits(config, 2)


def test_each_rank_holds_its_heads_of_the_cache(tmp_path: Path) -> None:
    """Together they hold what one rank holds, in pages of the same numbers."""
    config = tiny_engine_config(write_tiny_model(tmp_path), kv_cache_bytes=8 << 20)
    alone = ModelRunner.load(config, kernels=ReferenceKernels())
    logits_of(alone)
    with group_runner(config, 2) as (runner, followers):
        logits_of(runner)
        caches = [runner.cache, *(follower.cache for follower in followers)]
    pages = 4
    parts = [cache.tensor[:pages] for cache in caches]
    assert [part.shape[3] for part in parts] == [1, 1]
    torch.testing.assert_close(torch.cat(parts, dim=3), alone.cache.tensor[:pages], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("whole_output", [True, False])
def test_the_weights_of_a_rank_have_the_size_that_is_counted(tied: bool, whole_output: bool, tmp_path: Path) -> None:
    spec = load_spec(write_tiny_model(tmp_path, tie_word_embeddings=tied))
    sizes = []
    for number in range(2):
        rank, dtype = Rank(number, 2), torch.float32
        parameters = allocate_rank(spec, rank, dtype, torch.device("cpu"), whole_output=whole_output)
        tensors = [tensor for _, tensor in tensors_of(parameters) if tensor.device.type != "meta"]
        sizes.append(rank_bytes(spec, rank, dtype, on_cpu=True, whole_output=whole_output))
        assert sizes[-1] == sum(tensor.nbytes for tensor in tensors)
    table = 4 * spec.vocab_size * spec.hidden_size
    more = table // 2 if tied or whole_output else 0
    assert sizes[0] - sizes[1] == more + (0 if tied else table), "the first rank alone has the embedding"


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2)])
def test_prompts_are_scored_on_the_first_rank(ranks: int, stages: int, tmp_path: Path) -> None:
    config = tiny_engine_config(write_tiny_model(tmp_path), kv_cache_bytes=8 << 20)

    def scores(runner: ModelRunner) -> PromptScores:
        scored = PromptScores(IDS, 3)
        for start, end in ((0, 40), (40, len(IDS))):
            last = end == len(IDS)
            runner.run(StepBatch([row(IDS[start:end], start, [0, 1, 2, 3], drawn=last)._replace(scores=scored)]))
        return scored

    wanted = scores(ModelRunner.load(config, kernels=ReferenceKernels()))
    with group_runner(config, ranks, stages) as (runner, _):
        actual = scores(runner)
    assert actual.top_ids == wanted.top_ids
    assert actual.chosen == pytest.approx(wanted.chosen, abs=1e-4)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_term_that_is_added_before_the_sum_counts_once(
    stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs with long prompts."""
    monkeypatch.setattr(ThreadCollectives, "sums_in_place", lambda _, total: len(total) > 4)
    assert_same_logits(tiny_engine_config(write_tiny_model(tmp_path, "llama3")), 2, stages=stages)


@pytest.mark.parametrize(
    ("family", "fuses"),
    [
        *((family, True) for family in ("llama3", "qwen3_moe", "deepseek_v3", "nemotron_h")),
        *((family, False) for family in ("gemma2", "cohere2", "exaone4")),
    ],
)
def test_a_norm_after_a_sum_is_computed_with_it(
    family: str, fuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs with some dozens of tokens. Norms of other kinds, or of the output, do not follow a sum."""
    with_sum: set[int] = set()
    with_product: set[int] = set()
    norm_linear = ReferenceKernels.norm_linear

    def add_sum(self: ThreadCollectives, part: torch.Tensor, total: torch.Tensor, norm: Norm | None) -> Any:
        self.all_reduce(part)
        total += part
        if norm is None:
            return None
        with_sum.add(id(norm))
        return rms_norm(total, norm.weight, norm.eps)

    def apply(self: ReferenceKernels, hidden: torch.Tensor, norm: Norm | None, linear: Linear) -> torch.Tensor:
        with_product.add(id(norm))
        return norm_linear(self, hidden, norm, linear)

    config = tiny_engine_config(write_tiny_model(tmp_path, family), kv_cache_bytes=8 << 20)
    wanted = logits_of(ModelRunner.load(config, kernels=ReferenceKernels()))
    monkeypatch.setattr(ThreadCollectives, "all_reduce_add", add_sum)
    monkeypatch.setattr(ReferenceKernels, "norms_apart", lambda *_: True)
    monkeypatch.setattr(ReferenceKernels, "norm_linear", apply)
    with group_runner(config, 2) as (runner, _):
        actual = logits_of(runner)
    torch.testing.assert_close(actual, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    assert bool(with_sum) is fuses
    assert not with_sum & with_product


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2)])
def test_a_step_ends_only_after_every_rank_has_stored_its_kv(
    ranks: int, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank then hands over the pages of all ranks. Nothing is sampled, so no logits are gathered."""
    store, first_rank, stored = ReferenceKernels.rope_and_store, threading.get_ident(), []

    def store_late(self: ReferenceKernels, *arguments: Any) -> torch.Tensor:
        q = store(self, *arguments)
        if threading.get_ident() != first_rank:
            time.sleep(0.05)
            stored.append(1)
        return q

    config = tiny_engine_config(write_tiny_model(tmp_path, "llama3"))
    with group_runner(config, ranks, stages) as (runner, followers):
        monkeypatch.setattr(ReferenceKernels, "rope_and_store", store_late)
        runner.run(StepBatch([row(IDS[:21], 0, [0, 1], drawn=False)]))
        assert len(stored) == sum(follower.cache.first.depth for follower in followers)
