"""Models with adapters against models into which the adapters are merged: W + scale · B · A, in float32."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.settings.parsing import NamedPath
from tests.adapters import ATTENTION, DENSE, EVERY, TinyAdapter
from tests.factories import draw, tiny_engine_config, write_tiny_model
from tests.soak import soak

pytestmark = pytest.mark.usefixtures("adapters_read_here")

TOLERANCE = 3e-5
PROMPT = 37

EIGHT = [
    TinyAdapter(seed=0),
    TinyAdapter(seed=1, rank=1, alpha=1),
    TinyAdapter(seed=2, rank=16, alpha=16),
    TinyAdapter(seed=3, rank=20, alpha=4),
    TinyAdapter(seed=4, modules=("self_attn.q_proj", "self_attn.v_proj")),
    TinyAdapter(seed=5, modules=DENSE),
    TinyAdapter(seed=6, modules=("mlp.up_proj", "self_attn.o_proj")),
    TinyAdapter(seed=7, modules=ATTENTION, rank=3),
]
"""Adapters of all ranks and modules that may stand in one batch."""


def load(folder: Path, adapters: list[Path], kernels: Kernels | None = None, **changes: object) -> ModelRunner:
    sources = tuple(NamedPath(f"adapter-{number}", path) for number, path in enumerate(adapters, 1))
    changes = {"max_lora_rank": 32, **changes}
    return ModelRunner.load(tiny_engine_config(folder, loras=sources, **changes), kernels=kernels)


def ids(seed: int, length: int = PROMPT) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 160) for _ in range(length)]


def rows_of(adapters: list[int], *, start: int, tokens: int, share: int = 4) -> list[StepRow]:
    """Returns a row of the same prompt for each adapter, in pages of its own."""
    some = ids(1)[start : start + tokens]
    return [
        StepRow(some, start, range(number * share, (number + 1) * share), draw(), adapter=adapter)
        for number, adapter in enumerate(adapters)
    ]


def logits_of(runner: ModelRunner, adapters: list[int]) -> torch.Tensor:
    """Returns the logits of a prompt in chunks, and of two tokens behind it, [3, rows, vocab]."""
    runner.logits(StepBatch(rows_of(adapters, start=0, tokens=20)))
    steps = [runner.logits(StepBatch(rows_of(adapters, start=20, tokens=15))).clone()]
    steps += [runner.logits(StepBatch(rows_of(adapters, start=at, tokens=1))).clone() for at in (35, 36)]
    return torch.stack(steps)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [adapter.write(folder / str(number)) for number, adapter in enumerate(EIGHT)]


@pytest.mark.parametrize(
    "kernels", [pytest.param(lambda: None, id="device"), pytest.param(ReferenceKernels, id="reference", marks=soak)]
)
def test_eight_adapters_in_one_batch_equal_the_merged_models(
    base: Path, eight: list[Path], kernels: Callable[[], Kernels | None], tmp_path: Path
) -> None:
    order = [0, 3, 8, 1, 2, 7, 0, 5, 4, 6]
    actual = logits_of(load(base, eight, kernels()), order)
    for row, number in enumerate(order):
        merged = EIGHT[number - 1].merged(tmp_path / str(row)) if number else base
        wanted = logits_of(ModelRunner.load(tiny_engine_config(merged)), [0])[:, 0]
        torch.testing.assert_close(actual[:, row], wanted, atol=TOLERANCE, rtol=TOLERANCE)
    assert (actual[:, 1] - actual[:, 0]).abs().max() > 0.1  # the adapters do change the model


def test_one_batch_equals_each_adapter_alone(base: Path, eight: list[Path]) -> None:
    runner = load(base, eight)
    together = logits_of(runner, list(range(9)))
    for number in range(9):
        alone = logits_of(runner, [number])[:, 0]
        torch.testing.assert_close(together[:, number], alone, atol=1e-5, rtol=1e-5)


def test_a_row_without_an_adapter_has_the_bits_of_the_base_model(base: Path, eight: list[Path]) -> None:
    with_adapters, without = load(base, eight), ModelRunner.load(tiny_engine_config(base))
    assert torch.equal(logits_of(with_adapters, [0, 0]), logits_of(without, [0, 0]))


@pytest.mark.parametrize(
    "family",
    ["qwen2", "qwen3", "gemma2", "gemma3", "glm4", "granite", "mistral", "biased", "olmo2", "arcee", "cohere2"],
)
def test_families(family: str, tmp_path: Path) -> None:
    modules = [*EVERY, "mlp.gate_up_proj"]
    adapter = TinyAdapter(family, modules=modules)
    folder = write_tiny_model(tmp_path / "model", family)
    check(folder, adapter, tmp_path)


def test_stacked_modules_of_phi3(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "phi3")
    check(folder, TinyAdapter("phi3", modules=("qkv_proj", "o_proj", "gate_up_proj", "down_proj")), tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen2_moe"])
def test_attention_of_models_with_experts(family: str, tmp_path: Path) -> None:
    check(write_tiny_model(tmp_path / "model", family), TinyAdapter(family, modules=ATTENTION), tmp_path)


def check(folder: Path, adapter: TinyAdapter, tmp_path: Path, **scale: Callable[[str], float]) -> None:
    share = 8
    runner = load(folder, [adapter.write(tmp_path / "adapter")])
    wanted = ModelRunner.load(tiny_engine_config(adapter.merged(tmp_path / "merged", **scale)))
    pages = range(share * runner.kv_pages.groups)
    for start, tokens in ((0, 20), (20, 15), (35, 1)):
        row = StepRow(ids(1)[start : start + tokens], start, pages, draw(), adapter=1)
        logits = wanted.logits(StepBatch([row._replace(adapter=0)]))
        torch.testing.assert_close(runner.logits(StepBatch([row])), logits, atol=TOLERANCE, rtol=TOLERANCE)


def test_scales(base: Path, tmp_path: Path) -> None:
    adapter = TinyAdapter(rank=4, alpha=6, config={"use_rslora": True, "alpha_pattern": {"v_proj": 2}})
    check(base, adapter, tmp_path, scale=lambda module: (2 if module.endswith("v_proj") else 6) / 2)


def test_beside_quantized_weights(tmp_path: Path) -> None:
    """An update beside packed codes is the one beside the same weights dequantized."""
    changes = {"hidden_size": 64, "intermediate_size": 128}
    folder = write_tiny_model(tmp_path / "model", **changes)
    adapter = TinyAdapter(changes=changes).write(tmp_path / "adapter")
    packed, plain = load(folder, [adapter], quantization="int8"), load(folder, [adapter])
    actual, wanted = logits_of(packed, [0, 1]), logits_of(plain, [0, 1])
    torch.testing.assert_close(actual[:, 1] - actual[:, 0], wanted[:, 1] - wanted[:, 0], atol=0.2, rtol=0)
    assert (actual[:, 1] - actual[:, 0]).abs().max() > 0.5


def test_identity_is_that_of_the_bytes(base: Path, tmp_path: Path) -> None:
    one, other = TinyAdapter(seed=1), TinyAdapter(seed=2)
    same = load(base, [one.write(tmp_path / "a"), one.write(tmp_path / "b"), other.write(tmp_path / "c")])
    first, second, third = same.adapters.facts
    assert first.identity == second.identity != third.identity
    assert [adapter.name for adapter in same.adapters.facts] == ["adapter-1", "adapter-2", "adapter-3"]
    scaled = load(base, [replace(one, alpha=9.0).write(tmp_path / "d")])
    assert scaled.adapters.facts[0].identity != first.identity
