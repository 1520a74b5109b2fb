"""The shapes that ship for performance runs: each is a model of the size in its name."""

from pathlib import Path

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.load_spec import load_spec
from tandem.engine.models.parameters import named_weights
from tandem.engine.models.shapes import shape_config, shape_names, write_shape
from tandem.engine.weights.random_weights import fill_randomly, random_revision
from tandem.protocol.errors import InvalidArgument

BILLIONS = {
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671.0,
    "deepseek-v3-4-layers": 15.1,
    "deepseek-v3.2-4-layers": 15.2,
    "gemma-3-12b": 11.8,
    "gemma-3-27b": 27.0,
    "gpt-oss-20b": 20.9,
    "gpt-oss-20b-mxfp4": 20.9,
    "gpt-oss-120b": 116.8,
    "llama-3-70b": 70.6,
    "llama-3-8b": 8.03,
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "mimo-7b": 7.62,
    "qwen3-0.6b": 0.6,
    "qwen3-30b-a3b": 30.5,
    "qwen3-32b": 32.8,
    "qwen3-8b": 8.19,
}


def test_every_shape_has_the_parameters_of_its_model(tmp_path: Path) -> None:
    assert set(shape_names()) == set(BILLIONS)
    for name, billions in BILLIONS.items():
        config = load_spec(write_shape(name, tmp_path / name))
        weights = allocate_parameters(config, torch.bfloat16, torch.device("meta"))
        assert sum(weight.shape.numel() for _, weight in named_weights(weights)) / 1e9 == pytest.approx(
            billions, rel=0.01
        ), name


def test_a_shape_needs_no_folder(tmp_path: Path) -> None:
    for name in shape_names():
        assert shape_config(name) == load_spec(write_shape(name, tmp_path / name))


def test_an_unknown_shape_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="llama-3-8b"):
        write_shape("llama-9", tmp_path)


def test_random_weights_are_the_same_everywhere(tmp_path: Path) -> None:
    folder = write_shape("qwen3-0.6b", tmp_path)
    small = (folder / "config.json").read_text().replace("151936", "64").replace("28", "2")
    (folder / "config.json").write_text(small)
    config = load_spec(EngineConfig.of(folder, random_weights=True).served.model)
    first, second = (allocate_parameters(config, torch.bfloat16, torch.device("cpu")) for _ in range(2))
    fill_randomly(first)
    fill_randomly(second)
    assert torch.equal(first.layers[1].attention.output, second.layers[1].attention.output)
    assert torch.equal(first.final_norm, torch.ones_like(first.final_norm))
    assert 0.015 < float(first.layers[0].attention.output.float().std()) < 0.025
    assert random_revision(folder).startswith("random-")
