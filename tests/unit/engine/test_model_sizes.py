"""The predicted cost of a model's steps, from its shape alone."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem.cost_model.step_grid import EACH_TOKEN, gpu_grid
from tandem.engine import model_sizes as sizes_module
from tandem.engine.model_runner import ModelRunner
from tandem.engine.model_sizes import cost_guess, model_sizes, step_grid
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.families import slots_of
from tests.factories import tiny_engine_config, write_tiny_model


@pytest.mark.parametrize("family", ["llama3", "smollm2", "qwen3"])
def test_sizes_are_those_of_the_loaded_matrices(tmp_path: Path, family: str) -> None:
    runner = ModelRunner.load(tiny_engine_config(write_tiny_model(tmp_path / family, family)))
    shape, cache = runner.spec, runner.cache
    sizes = model_sizes(shape, cache.item_bytes)
    loaded = slots_of(shape, allocate_parameters(shape, torch.float32, torch.device("meta")))
    multiplied = {name: slot.tensor for name, slot in loaded.items() if slot.tensor.ndim == 2}
    if not shape.tied_embeddings:
        del multiplied["model.embed_tokens.weight"]
    assert sizes.weights == sum(matrix.numel() for matrix in multiplied.values())
    head = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
    assert sizes.output_weights == multiplied[head].numel()
    assert sizes.weight_bytes == 4 * sizes.weights
    assert sizes.kv_bytes_per_token * cache.page_tokens == cache.tensor[0].nbytes
    assert runner.cost_guess.base_s > 0
    assert runner.cost_guess.observed == 0


def test_costs_are_guessed_by_the_device_s_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner.load(tiny_engine_config(write_tiny_model(tmp_path / "llama3", "llama3")))
    shape = runner.spec
    multiprocessors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: multiprocessors)
    grid = step_grid(shape, torch.device("cuda"))
    assert grid == gpu_grid(shape.heads) != EACH_TOKEN
    assert (runner.cost_guess.tile_tokens, runner.cost_guess.wave_tokens) == (1, 1), "on a CPU"
    monkeypatch.setattr(sizes_module, "step_grid", lambda *_: grid)
    guessed = cost_guess(shape, runner.cache, runner.dtype.itemsize)
    assert (guessed.tile_tokens, guessed.wave_tokens) == (grid.tile_tokens, grid.wave_tokens)
