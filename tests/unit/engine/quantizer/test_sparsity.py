"""2:4 sparsity: which weights become zero, with and without calibration, and the folders that are written."""

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.quantizer.gptq import gptq
from tandem.engine.quantizer.quantize import QuantizationRecipe, quantize
from tandem.engine.quantizer.scheme import SCHEMES
from tandem.engine.quantizer.sparsity import SPARSITY, order_of_fours, prune_by_magnitude
from tandem.engine.steps.batch import StepBatch
from tandem.protocol.errors import InvalidArgument
from tests.factories import row, tiny_engine_config, write_tiny_model
from tests.unit.engine.quantizer.plain_reader import read_plainly, write_plain_copy
from tests.unit.engine.quantizer.test_calibrated import CPU, SAMPLES, correlated_inputs

PAIRS = [list(pair) for pair in combinations(range(4), 2)]
SPARSE = ["none", "w8a16", "w4a16-asym", "w8a8", "fp8"]


def _has_two_zeros_of_four(weight: Tensor) -> bool:
    return bool(((torch.unflatten(weight, -1, (-1, 4)) != 0).sum(-1) <= 2).all())


def test_the_two_largest_of_each_four_are_kept() -> None:
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5, 0.0, 0.0, -1.0, 0.0], [-4.0, 4.5, 4.25, 5.0, 1.0, 2.0, 3.0, -4.0]])
    assert prune_by_magnitude(weight).tolist() == [
        [0.0, -3.0, 2.0, 0.0, 0.0, 0.0, -1.0, 0.0],
        [0.0, 4.5, 0.0, 5.0, 0.0, 0.0, 3.0, -4.0],
    ]


def test_fours_stay_together_and_the_most_powerful_comes_first() -> None:
    power = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0])
    assert order_of_fours(power).tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3]


@pytest.mark.parametrize("scheme", SPARSE)
def test_calibrated_pruning_loses_less_than_that_by_magnitude(scheme: str) -> None:
    chosen = SCHEMES[scheme]
    group = 64 if chosen.grouped else None
    _, inputs = correlated_inputs(2048, 256)
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(2))
    pruned = gptq(weight, inputs, chosen, group, torch.float32, sparse=True).values()
    assert _has_two_zeros_of_four(pruned)
    assert inputs.error(pruned - weight) < 0.6 * inputs.error(prune_by_magnitude(weight) - weight)


def test_of_independent_inputs_the_pair_that_adds_the_least_error_is_pruned() -> None:
    """Without correlation no other column can compensate, so an exhaustive search finds the same pairs."""
    x = torch.diag(torch.tensor([3.0, 1.0, 2.0, 1.5, 1.0, 1.0, 4.0, 2.5]))
    _, inputs = correlated_inputs(16, 8)
    inputs.gram.copy_(x @ x)
    weight = torch.randn(32, 8, generator=torch.Generator().manual_seed(5))
    pruned = gptq(weight, inputs, SCHEMES["none"], None, torch.float32, sparse=True).values()
    for original, kept in zip(weight.view(-1, 4), pruned.reshape(-1, 4), strict=True):
        assert torch.equal(kept, torch.where(kept == 0, 0.0, original))
    errors = torch.unflatten(((weight - pruned) @ x).square(), 1, (-1, 4)).sum(-1)
    pairs = torch.stack([torch.unflatten((weight @ x).square(), 1, (-1, 4))[..., pair].sum(-1) for pair in PAIRS])
    # Damping adds 1 % of the mean power to each input's.
    assert (errors <= pairs.amin(0) * 1.1).all()


@pytest.mark.parametrize("scheme", SPARSE)
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_sparse_folder_is_served(method: str, scheme: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    recipe = QuantizationRecipe(SCHEMES[scheme], method, sparsity=SPARSITY)
    quantize(folder, tmp_path / "out", recipe, [] if method == "rtn" else SAMPLES, device=CPU)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if scheme == "none":
        plain = tmp_path / "out"
        weights = load_file(plain / "model.safetensors")
        assert config == json.loads((folder / "config.json").read_text())
    else:
        assert config["quantization_config"]["sparsity_config"]["sparsity_structure"] == SPARSITY
        weights, plain = read_plainly(tmp_path / "out"), write_plain_copy(tmp_path / "out", tmp_path / "copy")
    original = load_file(folder / "model.safetensors")
    assert weights.keys() == original.keys()
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            assert _has_two_zeros_of_four(weight), name
            assert not _has_two_zeros_of_four(original[name]), name
        elif method == "rtn":
            assert torch.equal(weight, original[name]), name
    runners = [
        ModelRunner.load(tiny_engine_config(path), kernels=ReferenceKernels()) for path in (tmp_path / "out", plain)
    ]
    logits = [runner.logits(StepBatch([row(SAMPLES[0], 0, list(range(8)))]), every_token=True) for runner in runners]
    # Activations of 8 bits are rounded, too.
    assert (logits[0] - logits[1]).abs().mean() < (0.2 if SCHEMES[scheme].activations else 1e-4) * logits[1].std()


def test_what_cannot_be_pruned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="'4:8' is not known; use 2:4"):
        QuantizationRecipe(SCHEMES["fp8"], sparsity="4:8")
    with pytest.raises(InvalidArgument, match="none changes no weight; use it with --sparsity 2:4"):
        QuantizationRecipe(SCHEMES["none"])
    with pytest.raises(InvalidArgument, match="awq is for weights that are quantized"):
        QuantizationRecipe(SCHEMES["none"], "awq", sparsity=SPARSITY)
    folder = write_tiny_model(tmp_path / "tiny", intermediate_size=94)
    with pytest.raises(InvalidArgument, match="have 94 inputs, no multiple of 4"):
        quantize(folder, tmp_path / "out", QuantizationRecipe(SCHEMES["none"], sparsity=SPARSITY), device=CPU)
