"""The calibrated methods on tiny models: they lose less than rounding, and folding alone loses nothing."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.quality.teacher_forced import compare
from tandem.engine.quantizer.awq import scale_for_activations
from tandem.engine.quantizer.calibrated_layer import CalibratedLayer, embedded
from tandem.engine.quantizer.calibration import CalibrationKernels, InputStatistics
from tandem.engine.quantizer.folding import Fold, folds
from tandem.engine.quantizer.gptq import gptq
from tandem.engine.quantizer.quantize import QuantizationRecipe, quantize
from tandem.engine.quantizer.rtn import round_to_nearest
from tandem.engine.quantizer.scheme import SCHEMES
from tandem.engine.quantizer.smoothquant import smooth
from tandem.engine.quantizer.source import Source
from tandem.engine.steps.batch import StepBatch
from tandem.protocol.errors import InvalidArgument, ModelError
from tests.factories import row, tiny_engine_config, write_tiny_model
from tests.unit.engine.quantizer.plain_reader import write_plain_copy

CPU = torch.device("cpu")
SAMPLES = [torch.randint(3, 160, (48,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(12)]
DENSE = ("llama3", "biased", "qwen2", "qwen3", "mistral", "phi3", "glm4", "granite", "smollm2")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def correlated_inputs(tokens: int, width: int, seed: int = 0) -> tuple[Tensor, InputStatistics]:
    """Correlated inputs, some much larger than others, as those of language models are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width // 4, generator=generator) @ torch.randn(width // 4, width, generator=generator)
    x = (x + torch.randn(tokens, width, generator=generator)) * torch.logspace(-1, 1, width)[
        torch.randperm(width, generator=generator)
    ]
    statistics = InputStatistics.zero(width, CPU)
    statistics.add(x[: tokens // 2])
    statistics.add(x[tokens // 2 :])
    return x, statistics


def _layers(folder: Path) -> Iterator[tuple[CalibratedLayer, list[Tensor]]]:
    with Source(folder) as source:
        hidden, kernels = embedded(source, SAMPLES[:3], CPU), CalibrationKernels()
        for number in range(len(source.spec.layers)):
            layer = CalibratedLayer(source, number, kernels, CPU)
            yield layer, hidden
            layer.run(hidden)


def test_statistics_are_sums_over_thecorrelated_inputs() -> None:
    x, statistics = correlated_inputs(64, 16)
    assert torch.allclose(statistics.gram, x.T @ x, rtol=1e-4)
    assert torch.allclose(statistics.mean, x.abs().mean(0), rtol=1e-5)
    assert torch.equal(statistics.largest, x.abs().amax(0))
    difference = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(statistics.error(difference), (x @ difference.T).square().sum(), rtol=1e-3)


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-asym", "w8a8", "fp8"])
def test_gptq_loses_less_than_rounding(scheme: str) -> None:
    chosen = SCHEMES[scheme]
    group = 64 if chosen.grouped else None
    _, inputs = correlated_inputs(2048, 256)
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(2))
    errors = [
        inputs.error(codes.values() - weight)
        for codes in (
            gptq(weight, inputs, chosen, group, torch.float32),
            round_to_nearest(weight, chosen, group, torch.float32),
        )
    ]
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_the_error_of_a_block_of_columns_is_made_up_for_by_those_of_the_next(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks only save time: the codes are those of one block with all columns, but for the rounding of sums."""
    _, inputs = correlated_inputs(2048, 320)
    weight = torch.randn(48, 320, generator=torch.Generator().manual_seed(2))
    chosen, group = SCHEMES[scheme], 64 if SCHEMES[scheme].grouped else None
    codes = {}
    for block in (320, 128, 7):
        monkeypatch.setattr("tandem.engine.quantizer.gptq._BLOCK", block)
        codes[block] = gptq(weight, inputs, chosen, group, torch.float32).codes
    for block in (128, 7):
        assert (codes[block] == codes[320]).float().mean() > 0.99


def test_inputs_that_no_token_has_are_rounded_to_nearest() -> None:
    x, _ = correlated_inputs(512, 64)
    x[:, 7] = 0
    inputs = InputStatistics.zero(64, CPU)
    inputs.add(x)
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    quantized = gptq(weight, inputs, SCHEMES["w4a16"], 32, torch.float32)
    nearest = round_to_nearest(weight, SCHEMES["w4a16"], 32, torch.float32)
    assert torch.equal(quantized.codes[:, 7], nearest.codes[:, 7])
    assert not torch.equal(quantized.codes, nearest.codes)


@pytest.mark.parametrize("family", DENSE)
def test_layers_compute_what_the_engine_computes(family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", family)
    runner = ModelRunner.load(tiny_engine_config(folder), kernels=ReferenceKernels())
    last = None
    for layer, hidden in _layers(folder):
        last = layer, hidden
    assert last is not None
    weights = load_file(folder / "model.safetensors")
    x = last[1][0]
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + runner.spec.norm_eps) * weights["model.norm.weight"]
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits = x @ head.T * runner.spec.logits_scale
    batch = StepBatch([row(SAMPLES[0], 0, list(range(8)))])
    assert torch.allclose(logits, runner.logits(batch, every_token=True), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["biased", "qwen3", "phi3", "mqa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folding_changes_no_layer(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    for layer, hidden in _layers(write_tiny_model(tmp_path / "tiny", family)):
        before = [states.clone() for states in hidden]
        after = [states.clone() for states in hidden]
        layer.run(before)
        for number, fold in enumerate(folds(layer, dtype)):
            scales = torch.rand(len(fold.divided[0]), generator=torch.Generator().manual_seed(number)) + 0.5
            fold.apply(scales)
        layer.run(after)
        for one, other in zip(before, after, strict=True):
            assert torch.allclose(one, other, atol=1e-4, rtol=1e-4)


def test_smoothing_gives_inputs_and_weights_one_range() -> None:
    _, inputs = correlated_inputs(256, 64)
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    norm, before = torch.ones(64), weight.clone()
    smooth(Fold(weight, (norm,), torch.float32), inputs)
    assert torch.allclose(inputs.largest * norm, weight.abs().amax(0), rtol=1e-4)
    assert torch.allclose(weight * norm, before, rtol=1e-4)


def test_awq_loses_less_than_rounding() -> None:
    _, inputs = correlated_inputs(512, 128)
    scheme, weight = SCHEMES["w4a16"], torch.randn(32, 128, generator=torch.Generator().manual_seed(4))
    plain = inputs.error(round_to_nearest(weight, scheme, 32, torch.float32).values() - weight)
    norm, scaled = torch.ones(128), weight.clone()
    scale_for_activations(Fold(scaled, (norm,), torch.float32), inputs, scheme, 32, torch.float32)
    error = inputs.error(round_to_nearest(scaled, scheme, 32, torch.float32).values() * norm - weight)
    assert error < 0.9 * plain


@pytest.mark.parametrize(
    ("method", "scheme"), [("gptq", "w4a16"), ("gptq", "w4a16-asym"), ("awq", "w4a16"), ("smoothquant", "w8a8")]
)
@pytest.mark.parametrize("family", ["llama3", "phi3"])
def test_a_calibrated_folder_is_whole(method: str, scheme: str, family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", family)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    done: list[float] = []
    quantize(
        folder,
        tmp_path / "out",
        QuantizationRecipe(SCHEMES[scheme], method),
        SAMPLES,
        device=CPU,
        progress=lambda _, part: done.append(part),
    )
    assert done[-1] == 1.0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.norm.weight"].dtype == stored["model.layers.0.input_layernorm.weight"].dtype == torch.bfloat16
    quantized = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert quantized["format"] == SCHEMES[scheme].layout
    copy = write_plain_copy(tmp_path / "out", tmp_path / "copy")
    runners = [ModelRunner.load(tiny_engine_config(path), kernels=ReferenceKernels()) for path in (folder, copy)]
    comparison = compare(runners[0], runners[1], SAMPLES[:4])
    assert comparison.decode.kl < (0.005 if scheme == "w8a8" else 0.2)


def test_what_has_no_calibration_is_refused(tmp_path: Path) -> None:
    recipe = QuantizationRecipe(SCHEMES["w4a16"], "gptq")
    for family, reason in (
        ("mixtral", "experts"),
        ("gemma3", "norms that are stored minus 1"),
        ("olmo2", "layers whose inputs are not normalized"),
        ("arcee", "feed-forward networks without a gate"),
        ("cohere2", "LayerNorm"),
        ("glm4", "_proj.* in another form than layers compute with"),
    ):
        folder = write_tiny_model(tmp_path / family, family)
        with pytest.raises(ModelError, match=reason + r".*; use --method rtn"):
            quantize(folder, tmp_path / "out", recipe, SAMPLES, device=CPU)
    with pytest.raises(InvalidArgument, match="smoothquant is for 8-bit activations"):
        QuantizationRecipe(SCHEMES["w4a16"], "smoothquant")
